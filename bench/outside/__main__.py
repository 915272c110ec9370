"""
What does `python autopsy SCRIPT.py` say of programs that others wrote, with labels of theirs?

    python bench/outside                 fetches three sets (git, pip), runs them, writes the table
    python bench/outside --from DIR      takes the sets that DIR has, fetches the others into it
    python bench/outside --only gallery  one set: its part of the raw file is made anew

GRIST (ESEC/FSE 2021): programs whose authors know that a search leads them to a NaN. TrainCheck
(OSDI 2025): silent errors, their mended twins, and healthy programs. torchtest2 (PyPI): the bug
gallery of its README. Nothing of theirs is in this repository. The words that autopsy must say
stand below and were written, from their READMEs, before the first run; the report that was printed
is in the raw file. (Two were widened after it: "aten.div, backward of SqrtBackward0" is a sqrt.)
Programs run unchanged, but for stand-ins that make them short: MNIST is 300 of its test images (of
GRIST's folder), wikitext's training text is its validation text, `.cuda()` does nothing without a
GPU, GRIST searches for 2 minutes instead of 30. torchtest2 has no loop: ours is `check_model` in
STAND_INS. What cannot run here has a row with the reason, and is not counted.
"""

import atexit
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.record import ROOT, arguments, header

GRIST, TRAINCHECK, GALLERY = "GRIST", "TrainCheck-Evaluation-Workloads", "torchtest2-0.1.0"
FETCH = {
    GRIST: "git clone --depth 1 https://github.com/Jacob-yen/GRIST",
    TRAINCHECK: f"git clone --depth 1 https://github.com/OrderLab/{TRAINCHECK}",
    GALLERY: "pip download -q --no-deps --no-binary :all: torchtest2==0.1.0",
}
STAND_INS = {
    "sitecustomize.py": """
import gzip, os, sys, torch
def mnist(root=None, train=True, transform=None, target_transform=None, download=False):
    def read(name, skip):
        with gzip.open(os.path.join(os.environ["MNIST"], name)) as file: return file.read()[skip:]
    images = torch.frombuffer(bytearray(read("t10k-images-idx3-ubyte.gz", 16)), dtype=torch.uint8)
    y = torch.tensor(list(read("t10k-labels-idx1-ubyte.gz", 8)))[:300]
    x = images.view(-1, 28, 28)[:300]
    from torchvision.datasets import VisionDataset
    class MNIST(VisionDataset):
        data, targets = x, y
        def __len__(self): return len(y)
        def __getitem__(self, i):
            from PIL import Image
            picture = Image.fromarray(x[i].numpy())
            return self.transform(picture) if self.transform else picture, int(y[i])
    return MNIST(root, transform=transform)
if "MNIST" in os.environ:
    from torchvision import datasets
    datasets.MNIST = datasets.mnist.MNIST = mnist
if not torch.cuda.is_available():
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *a, **k: self
    to = torch.Tensor.to
    torch.Tensor.to = lambda self, *a, **k: to(self, *["cpu" if x == "cuda" else x for x in a], **k)
""",
    "traincheck.py": """
import sys
def annotate_stage(name): pass
meta_vars, __path__ = {}, []
sys.modules["traincheck.instrumentor"] = sys.modules["traincheck"]
""",
    "torchtest2.py": """
import torch
def check_model(model, inputs, targets=None, loss_fn=None, optimizer=None, **options):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    call = (lambda: model(**inputs)) if isinstance(inputs, dict) else lambda: model(inputs)
    for step in range(200):  # as many as torchtest2 takes on one batch
        out = call()
        loss = loss_fn(out, targets) if loss_fn else out.square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    model.eval()
    with torch.no_grad(): print(loss.item(), call().mean().item())
""",
}
# Operations that GRIST searches for; a report must name one, on a line outside of GRIST's library.
UNSAFE = r"first bad op: aten\.\w*(log|exp|div|sqrt|pow|reciprocal|softmax|cross_entropy)"

# Faults of TrainCheck: folder | script | its mended twin | words of its README's root cause
FAULTS = r"""
stackoverflow-60335387 | bug.py | fixed.py | zero_grad|clear
pytorch-51800 | mnist_51800_buggy.py | mnist_51800_correct.py | spectral
"""
# Healthy programs of TrainCheck, with arguments that make them short
HEALTHY = """
dcgan main.py --dataset fake --niter 1 --workers 0 --ngf 16 --ndf 16
gat main.py --epochs 20
gcn main.py --epochs 40
mnist main.py --epochs 1
mnist-forward-forward main.py --epochs 3 --train_size 300 --test_size 300
mnist-hogwild main.py --epochs 1
mnist-rnn main.py --epochs 1
regression main.py
reinforce-actor-critic actor_critic.py
reinforce-reinforce reinforce.py
siamese-network main.py --epochs 1
time-sequence-prediction train.py --steps 1
vae main.py --epochs 2
word-language-model-lstm main.py --epochs 1 --emsize 32 --nhid 32 --batch_size 80
word-language-model-transformer main.py --epochs 1 --emsize 32 --batch_size 80 --model Transformer
"""
NOT_RUN = """
pytorch-115607: torch has mended it
pytorch-forum-84911: needs CIFAR-100 and pretrained weights
stackoverflow-67180955: trains nothing (workers that draw the same numbers)
baichuan2-86: several GPUs, trained weights
deepspeed-1801: several GPUs, DeepSpeed
deepspeed-5794: several GPUs, DeepSpeed
lightning-thunder-725: lightning-thunder
mmpretrain-702: mmpretrain
pytorch-84803: several GPUs
pytorch-96600: several GPUs
pytorch-104336: several GPUs
transformers-17877: transformers, trained weights
transformers-23723: transformers, trained weights
transformers-33844: transformers, trained weights
transformers-34204: transformers, trained weights
x-jxmnop-ddp-out-of-sync: several GPUs, transformers, trained weights
resnet18: its smallest set is 1.28 million images
autocast: a GPU
ddp-multigpu: two GPUs
"""
# Examples of the gallery, one a line: what the report must name
WORDS = r"""
2\.weight|optimizer
backbone
samples? (read|depend)|across the batch
influence|ignored|never read
mask
0\.0\.weight|frozen
first bad op: .*(sqrt|pow)
first loss|ln\(
dropout|eval
rate|lr
first bad op: .*sqrt
Square
"""
CLOSING = r"autopsy: .*nothing non-finite.*"


def sets(folder):
    """Fetch what `folder` lacks; a sentence if there is no network."""
    for name, command in FETCH.items():
        if not (folder / name).exists():
            words = command.split()
            words[:1] = [sys.executable, "-m", "pip"] if words[0] == "pip" else words[:1]
            if subprocess.run(words, cwd=folder).returncode:
                raise SystemExit(
                    f"{name} could not be fetched (is there a network?). "
                    f"If you have it, give its parent folder: --from DIR"
                )
        for archive in folder.glob(f"{name}.tar.gz"):
            shutil.unpack_archive(archive, folder)


def programs(folder):
    """(set, name, kind, folder to copy, argv, words, options of autopsy) of each program."""
    for path in sorted(folder.glob(f"{GRIST}/scripts/study_case/**/*_grist.py")):
        text = path.read_text(errors="replace")
        if "import torch" in text and "GradientSearcher(" in text:
            case = path.relative_to(folder / GRIST / "scripts" / "study_case").parts[0]
            yield "grist", case, "nan", path.parent, [path.name], UNSAFE, []
    faults = folder / TRAINCHECK / "silent-issue-detection" / "bug-reprod-scripts"
    for line in FAULTS.strip().splitlines():
        name, script, twin, words = line.split(" | ")
        yield "traincheck", name, "wrong", faults / name, [script], words, []
        yield "traincheck", f"{name}, mended", "healthy", faults / name, [twin], "", []
    for line in HEALTHY.strip().splitlines():
        name, *argv = line.split()
        place = folder / TRAINCHECK / "fp_rate" / "workloads" / name
        yield "traincheck", name, "healthy", place, argv, "", []
    page = (folder / GALLERY / "README.md").read_text()
    gallery = page.split("## Bug gallery")[-1].split("\n## ")[0]
    setup, *examples = re.split(r"\n### (?=\d)", gallery)
    for example, words in zip(examples, WORDS.split("\n")[1:-1], strict=True):
        number = int(example.split(".")[0])
        code = re.findall(r"```python\n(.*?)```", setup + example, re.S)
        body = code[0] + code[-1 if number == 10 else 1] + "print(report)\n"
        kind = "nan" if number in (7, 11) else "wrong"
        options = ["--check-gradients"] if number == 12 else []
        title = example.splitlines()[0]
        labels = set(re.findall(r"^(?:FAIL|WARN)  (\w+)", example, re.M))
        yield "gallery", title, kind, body, [labels], words, options


def run(command, place, more):
    """(exit code, stdout, stderr) of a Python program: a fork, so that torch is imported once."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            atexit._clear()  # else it would remove our temporary folders
            os.chdir(place)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.path[:1] = map(str, more)
            sys.argv = list(map(str, command))
            os._exit(program_ends(sys.argv[0]))
        code = None
        for _ in range(9000):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        texts = [os.pread(file.fileno(), 10**7, 0).decode(errors="replace") for file in (out, err)]
    return (code, *texts) if code is not None else (-1, "", "not finished in 900 seconds")


def program_ends(path):
    """Run it as Python runs a program; its exit code."""
    code = 0
    try:
        exec(compile(STAND_INS["sitecustomize.py"], "stand-ins", "exec"), {})
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def outcome(program, folder):
    """The row of a program."""
    name_of_set, name, kind, place, argv, words, options = program
    row = {"set": name_of_set, "kind": kind}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        work = shims = root / "stand_ins"
        shims.mkdir()
        for file, text in STAND_INS.items():  # a fork runs the first itself
            (shims / file).write_text(text)
        if name_of_set == "gallery":
            (root / "example.py").write_text(place)
            code, out, _ = run(["example.py"], root, [folder / GALLERY])
            said = set(re.findall(r"^ *(?:FAIL|WARN) +(\w+)", out, re.M))
            row["torchtest2"] = {"right": bool(argv[0] & said), "said": sorted(said)}
            work, argv = root, ["example.py"]
        elif name_of_set == "grist":
            case = root / "scripts" / "study_case" / name
            scripts = folder / GRIST / "scripts"
            shutil.copytree(
                scripts / "study_case" / name,
                case,
                ignore=shutil.ignore_patterns("*ubyte*", "*.pt"),
            )
            for part in ("utils", "config"):
                shutil.copytree(scripts / part, root / "scripts" / part)
            for file in root.glob("scripts/*/*"):
                if file.suffix in (".py", ".config"):
                    text = file.read_text().replace('"/data/scripts', f'"{root}/out')
                    file.write_text(text.replace("time_limit=30", "time_limit=2"))
            work = case / place.relative_to(scripts / "study_case" / name)
        else:
            work = root / "program"
            shutil.copytree(place, work)
            for text in work.glob("data/wikitext-2/valid.txt"):
                shutil.copy(text, text.with_name("train.txt"))
        command = [ROOT / "autopsy", *options, "--one-run", *argv]
        code, out, err = run(command, work, [shims, root, work])
        err = err.replace(str(work), "").replace(str(root), "")
    lines = re.findall(r"^autopsy.*(?:\n  .*)*", err, re.M)  # not the code that a warning shows
    said = "\n".join(line for line in lines if not re.match(CLOSING, line))
    if code not in (0, 3):
        last = (err.strip().splitlines() or ["no output"])[-1]
        return row | {"not run": last[:200], "code": code}
    if name_of_set == "grist" and code == 0:
        return row | {"not run": "GRIST's search found no NaN", "code": code}
    healthy = not said and code == 0
    right = healthy if kind == "healthy" else bool(re.search(words, said, re.IGNORECASE))
    return row | {"right": right, "code": code, "said": said}


def table(rows):
    """{kind: [right, of]}, of the rows that ran."""
    ran = [row for row in rows.values() if "right" in row]
    right = {kind: [sum(row["right"] for row in ran if row["kind"] == kind),
                    sum(row["kind"] == kind for row in ran)]
             for kind in sorted({row["kind"] for row in ran})}  # fmt: skip
    if rivals := [row["torchtest2"]["right"] for row in rows.values() if "torchtest2" in row]:
        right["torchtest2"] = [sum(rivals), len(rivals)]
    return {"right, of": right, "n": len(ran)}


def main():
    parser = arguments(__doc__, "cpu")
    parser.add_argument("--from", dest="folder", type=Path)
    parser.add_argument("--only", choices=["grist", "traincheck", "gallery"])
    args = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    folder = (args.folder or Path(tempfile.mkdtemp())).resolve()
    sets(folder)
    for file in folder.glob(f"{GRIST}/scripts/study_case/**/t10k-images-idx3-ubyte.gz"):
        os.environ["MNIST"] = str(file.parent)
    path = args.results / "outside-cpu.json"
    for name, source in (("grist", GRIST), ("traincheck", TRAINCHECK), ("gallery", GALLERY)):
        if args.only not in (None, name):
            continue
        version = subprocess.run(
            ["git", "-C", folder / source, "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        head = header("outside", args) | {"source": source, "commit of the source": version}
        lines = [line.split(": ") for line in NOT_RUN.strip().splitlines()]
        rows = {k: {"not run": why} for k, why in lines if name == "traincheck"}
        chosen = [program for program in programs(folder) if program[0] == name]
        for program in chosen:
            row = rows[program[1]] = outcome(program, folder)
            print(program[1], json.dumps(row, ensure_ascii=False), flush=True)
            part = head | table(rows) | {"rows": rows}
            if not args.smoke:
                now = json.loads(path.read_text()) if path.exists() else {}
                whole = json.dumps(now | {name: part}, indent=1, ensure_ascii=False)
                path.write_text(whole + "\n")
        print(json.dumps({name: table(rows)}))


if __name__ == "__main__":
    main()
