"""
All that only a GPU can tell, in three stages of at most nine minutes:  bash run.sh gpu [STAGE]

    correctness    does all of it run there, to its end, bit for bit where it says so?
    figures        what the guards, the precisions and the optimizer cost; time to accuracy
    decisions      what has to be known before a default is changed

    python bench/gpu.py correctness figures --airbench cifar10-airbench --data-dir DIR
    python bench/gpu.py --device cpu --smoke       do its parts run?

Each part is a process of its own and leaves bench/results/gpu/PART.json: commit, hardware, exit
code, seconds, its last line. A part that has ended well on this commit is not repeated, so a stage
that was cut short goes on where it was. What fails does not keep the rest from being measured.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record

ROOT = record.ROOT
LIMIT = 540  # seconds a stage
CLASSES = [str(k) for k in range(10)]
NETS = ("cifarnet", "resnet18", "vit", "swin", "swin-v2", "vmamba", "dit", "slat_vae", "vlm")
KEPT = ("status", "precision", "steps", "skipped", "healed", "val_acc1", "val_loss", "seconds",
        "images_per_second", "peak_memory_mb", "refused")  # fmt: skip


def train(args, *more, **flags):
    """What the end of a run of train.py says."""
    flags = {name.replace("_", "-"): value for name, value in flags.items()}
    few = {"batch-size": 8, "max-steps": 3} if args.smoke else {}
    flags = {"dataset": "synthetic", "device": args.device} | flags | few
    end = record.train_run(flags, *more)[1]
    return {key: end[key] for key in KEPT if key in end}


def nets(args):
    return ("cifarnet-tiny", "vit-test") if args.smoke else NETS


def models(args):
    """Every model for 25 steps: CUDA graph, verified twice."""
    rows = {}
    for name, precision in itertools.product(nets(args), ("bf16", "fp16", "O2")):
        row = train(args, model=name, precision=precision, max_steps=25, verify_every=10)
        rows[f"{name}, {precision}"] = row
    return rows, all(row.get("status") == "done" for row in rows.values())


def deterministic(args):
    ends = [train(args, "--deterministic", max_steps=40, precision="bf16") for _ in range(2)]
    return ends, ends[0]["status"] == "done" and ends[0]["val_loss"] == ends[1]["val_loss"]


def bad_label(args):
    end = train(args, max_steps=80, inject=f"nan:label@step={2 if args.smoke else 60}")
    return end, end["status"] == "done" and end["skipped"] >= 1


def command_line(args, folder, *more):
    return [sys.executable, str(ROOT / "train.py"), f"--device={args.device}",
            "--dataset=synthetic", "--batch-size=100", f"--out-dir={folder}", *more]


def killed(args):
    """Killed with SIGKILL and resumed, beside the same run left alone: the same bits?"""
    steps = 6 if args.smoke else 60
    with tempfile.TemporaryDirectory() as folder:

        def start(name, *more):
            command = command_line(args, Path(folder, name), f"--max-steps={steps}",
                                   "--deterministic", "--precision=bf16", "--ckpt-every=2", *more)
            return subprocess.Popen(command, stdout=subprocess.DEVNULL)

        whole = start("whole").wait()
        run = start("killed")
        last = Path(folder, "killed", "last.pt")
        while run.poll() is None and not last.exists():
            time.sleep(0.05)
        time.sleep(0.3)
        run.send_signal(signal.SIGKILL)
        run.wait()
        resumed = start("killed", "--resume=auto").wait()
        a, b = (torch.load(Path(folder, name, "last.pt"), weights_only=True)["model"]
                for name in ("whole", "killed"))
    same = all(torch.equal(a[name], b[name]) for name in a)
    return {"codes": [whole, resumed], "same": same}, same and whole == resumed == 0


def ranks(args):
    """Two processes on one GPU, which NCCL refuses: gloo."""
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        again = [sys.executable, *launch, __file__, *sys.argv[1:]]
        return {}, subprocess.run(again, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo")
    flags = {"dataset": "synthetic", "device": args.device, "max-steps": 6, "batch-size": 64,
             "out-dir": Path(tempfile.gettempdir(), f"ranks-{os.getppid()}")}
    code, end, _ = record.train_run(flags)
    os._exit(code or end.get("status", "done") != "done")


def speeds(args):
    """fp16 beside bf16, compiled in the graph, large batches, the price of evaluation in fp32."""
    steps = {"max_steps": 150, "ckpt_every": 150}
    rows = {}
    for name, precision in itertools.product(("cifarnet", "resnet50", "vit"), ("bf16", "fp16")):
        name = "cifarnet-tiny" if args.smoke else name
        rows[f"{name}, {precision}"] = train(args, model=name, precision=precision, **steps)
    for batch, graph in itertools.product((64, 1000, 2000), ("--cuda-graph", "--no-cuda-graph")):
        rows[f"batch {batch}, {graph}"] = train(args, graph, batch_size=batch, **steps)
    if not args.smoke:  # minutes on a CPU
        rows["compiled, in the graph"] = train(args, "--compile", "--cuda-graph", **steps)
    for precision in ("fp32", "same"):
        rows[f"evaluated in {precision}"] = train(args, eval_precision=precision, epochs=4)
    return rows, True


def repeated(args):
    """Is the same pass the same bits, 200 times? That is what verify leans on."""
    from models import MODELS, wrap

    device, rows = torch.device(args.device), {}
    for name in nets(args):
        torch.manual_seed(0)
        model = wrap(MODELS[name][0](CLASSES, 32)).to(device)
        images, labels = torch.randn(32, 3, 32, 32), torch.arange(32) % 10
        images, labels = images.to(device), labels.to(device)
        sums = set()
        for _ in range(3 if args.smoke else 200):
            torch.manual_seed(1)
            model.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss, _ = model(images, labels)
            loss.backward()
            grads = [p.grad.double().sum() for p in model.parameters() if p.grad is not None]
            sums.add(torch.stack(grads).sum().item())
        rows[name] = len(sums)
    return rows, True


def profile(args):
    """Kernels of a step of the default model, kernel by kernel and replayed, at both its sizes."""
    from bench import guard_cost

    device, tables = torch.device(args.device), {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for size, way in itertools.product((28, 32), ("ours", "ours, CUDA graph")):
        if "graph" in way and device.type == "cpu":
            continue
        shape = (8 if args.smoke else 1000, 3, size, size)
        build = lambda: guard_cost.MODELS["cifarnet"][0](CLASSES, 32)  # noqa: E731
        makers = guard_cost.contestants(build, shape, device)
        step = guard_cost.warm(makers[way])
        with torch.profiler.profile(activities=activities) as watched:
            step()
        sort = f"self_{device.type}_time_total"
        tables[f"{size}, {way}"] = watched.key_averages().table(sort_by=sort, row_limit=40)
    return tables, True


def start(args):
    """Seconds of a run of two steps: almost all of it is the start."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command_line(args, folder, "--max-steps=2"), capture_output=True)
    return time.perf_counter() - began, done.returncode == 0


def whole(args):
    """The default run, to its end."""
    end = train(args, data_dir=args.data_dir, dataset="cifar10" if args.data_dir else "synthetic")
    return end, end["status"] == "done"


HERE = {part.__name__: part for part in (models, deterministic, bad_label, killed, ranks, speeds,
                                         repeated, profile, start, whole)}  # fmt: skip
STAGES = {
    "correctness": ("tests", "whole", "deterministic", "bad_label", "killed", "ranks", "models"),
    "figures": ("time_to_accuracy", "guard_cost", "precision_ladder", "optim_step", "scan",
                "save_stall"),
    "decisions": ("start", "profile", "speeds", "repeated"),
}  # fmt: skip


def command(part, args):
    """What runs this part; None: it cannot be run here."""
    smoke = ["--smoke"] if args.smoke else []
    if part == "tests":
        files = "tests/test_graphs.py" if args.smoke else "tests"
        return [sys.executable, "-m", "pytest", "-q", "-k", "cuda", files]
    program = [__file__, "--part", part] if part in HERE else [f"bench/{part}.py"]
    words = [sys.executable, *program, "--device", args.device, *smoke]
    if part in ("whole", "time_to_accuracy") and args.data_dir:
        words += ["--data-dir", str(args.data_dir)]
    if part == "time_to_accuracy":
        return [*words, "--airbench", str(args.airbench)] if args.airbench else None
    return words


def run(part, args, seconds):
    """Run a part unless its result is there; True if it ended well."""
    path = args.results / f"{part}.json"
    commit = record.commit()
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("commit") == commit and before["code"] == 0:
        print(f"{part}: is there")
        return True
    words = command(part, args)
    if words is None:
        print(f"{part}: left out, --airbench is missing")
        return True
    if seconds < 5:
        print(f"{part}: no time left; run this stage again")
        return False
    began = time.time()
    log = path.with_suffix(".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        try:
            done = subprocess.run(words, cwd=ROOT, stdout=out, stderr=out, timeout=seconds)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = log.read_text().splitlines() or [""]
    head = record.header(part, args)
    head |= {"code": code, "seconds": round(time.time() - began, 1), "last": lines[-1]}
    path.write_text(json.dumps(head) + "\n")
    print(f"{part}: code {code} after {head['seconds']} s  {lines[-1][:200]}", flush=True)
    return code == 0


def main():
    parser = record.arguments(__doc__)
    parser.set_defaults(results=record.RESULTS / "gpu")
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--airbench", type=Path, help="a clone of cifar10-airbench")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10")
    parser.add_argument("--part", choices=HERE, help="one part, in this process")
    args = parser.parse_args()
    if args.part:
        found, well = HERE[args.part](args)
        print(json.dumps(found))
        sys.exit(not well)
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"{unknown} is none of {', '.join(STAGES)}")
    results = []
    for stage in args.stages or STAGES:
        end = time.time() + LIMIT
        results += [run(part, args, end - time.time()) for part in STAGES[stage]]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
