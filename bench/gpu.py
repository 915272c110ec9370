"""
All that only a GPU can tell, in three calls of at most 570 seconds:  bash run.sh gpu STAGE

    accuracy       time to accuracy beside the records; what each precision costs and keeps
    costs          of the guards, with launches and memory of all models; of the watch, the
                   optimizer, a save
    correctness    bad samples, two ranks, a kill, the tests; whole runs; all models

    python bench/gpu.py accuracy --airbench cifar10-airbench --data-dir DIR
    python bench/gpu.py --device cpu --smoke       do its parts run? All three stages

A stage runs its most valuable parts first. Each part is a process of its own and writes its raw
file in --results after each round. If you call a stage again with the same code, an unfinished part
goes on where it was. A part that fails does not stop the others. In --results, gpu/PART.json has
exit code, seconds and last line, gpu/PART.txt all lines.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record
from bench.kill_resume import children

ROOT = record.ROOT
LIMIT = 550  # seconds a stage; the rest of 570 is for Python's start and for the end of a part
STAGES = {
    "accuracy": ("time_to_accuracy", "precision_ladder"),
    "costs": ("guard_cost", "steps", "watch_cost", "optim_step", "save_stall", "scan"),
    "correctness": ("survival", "tests", "runs", "models"),
}


def command(part, args):
    """The command of this part; None if it cannot run here."""
    own = ROOT / "bench" / f"{part}.py"
    program = [str(own)] if own.exists() else [str(ROOT / "bench" / "gpu_parts.py"), part]
    words = [sys.executable, *program, f"--device={args.device}", f"--results={args.results}"]
    words += ["--smoke"] if args.smoke else []
    if part in ("runs", "time_to_accuracy") and args.data_dir:
        words.append(f"--data-dir={args.data_dir.resolve()}")
    if part == "time_to_accuracy":
        peers = {"airbench": args.airbench, "hiverge": args.hiverge}
        clones = [f"--{name}={clone.resolve()}" for name, clone in peers.items() if clone]
        return [*words, "--seeds=5", *clones] if clones else None
    return words


def family(pid):
    """Linux: a process and all its descendants, in whatever session they are."""
    return [pid, *(member for child in children(pid) for member in family(child))]


def ended(words, out, seconds):
    """The exit code; 124: time was up. None of its processes outlives this call."""
    process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
                               env={**os.environ, "PYTHONUNBUFFERED": "1"})  # fmt: skip
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        others = family(process.pid)[1:]  # torchrun's workers have left the group
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def run(part, args, seconds):
    """Run a part unless it has its result; True if it ended well."""
    path = args.results / "gpu" / f"{part}.json"
    head = record.header(part, args)
    before = json.loads(path.read_text()) if path.exists() else {}
    if (before.get("code"), before.get("exit")) == (head["code"], 0):
        print(f"{part}: is there")
        return True
    words = command(part, args)
    if words is None:
        print(f"{part}: left out, --airbench and --hiverge are missing")
        return True
    if seconds < 5:
        print(f"{part}: no time left; call this stage again")
        return False
    began = time.time()
    log = path.with_suffix(".txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        code = ended(words, out, seconds)
    lines = log.read_text().splitlines() or [""]
    head |= {"exit": code, "seconds": round(time.time() - began, 1), "last": lines[-1]}
    path.write_text(json.dumps(head) + "\n")
    print(f"{part}: code {code} after {head['seconds']} s  {lines[-1][:200]}", flush=True)
    return code == 0


def main(argv=None):
    parser = record.arguments(__doc__)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--airbench", type=Path, help="a clone of cifar10-airbench")
    parser.add_argument("--hiverge", type=Path, help="a clone of hiverge/cifar10-speedrun")
    parser.add_argument("--data-dir", type=Path, help="CIFAR-10")
    args = parser.parse_args(argv)
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"{unknown} is none of {', '.join(STAGES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then the parts end too
    args.results = Path(tempfile.mkdtemp()) if args.smoke else args.results.resolve()
    print(f"results and logs: {args.results}")
    well = True
    for stage in args.stages or STAGES:
        began = time.time()
        for part in STAGES[stage]:
            well &= run(part, args, LIMIT - (time.time() - began))
        print(f"{stage}: {time.time() - began:.0f} s", flush=True)
    sys.exit(not well)


if __name__ == "__main__":
    main()
