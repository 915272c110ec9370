"""What several test files need: states compared bit for bit, and many scripts in one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten, tree_map

ROOT = Path(__file__).resolve().parent.parent


def snapshot(*things):
    """A copy of every tensor in modules, optimizers and nests of tensors."""
    states = [thing.state_dict() if hasattr(thing, "state_dict") else thing for thing in things]
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, states)


def identical(a, b):
    """Two tensors, bit for bit: a NaN equals the same NaN, 0.0 differs from -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    a, b = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def same(a, b):
    """Two nests of tensors and plain values: the same structure, the same bits."""
    (a, shape_a), (b, shape_b) = tree_flatten(a), tree_flatten(b)
    if shape_a != shape_b:
        return False
    for x, y in zip(a, b, strict=True):
        tensors = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        if not (identical(x, y) if tensors else type(x) is type(y) and x == y):
            return False
    return True


RUNNER = """
import json, os, runpy, sys, traceback
import torch
for number, (argv, folder) in enumerate(json.load(open(sys.argv[1]))):
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    out, err, code = (f"{sys.argv[1]}.{number}.{kind}" for kind in ("out", "err", "code"))
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
    status = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    open(code, "w").write(str(status))
    os._exit(0)
"""


def run_scripts(jobs, folder, timeout=900):
    """Each of `jobs`, (argv, working folder), as `python *argv` runs it: [(exit code, out, err)].

    One process imports torch, once, and each script is a fork of it. `folder`: for what they print.
    """
    path = Path(folder) / "jobs.json"
    path.write_text(json.dumps([([str(word) for word in argv], str(at)) for argv, at in jobs]))
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", RUNNER, str(path)], env=environment, check=True,
                   timeout=timeout)
    results = []
    for number in range(len(jobs)):
        out, err, code = (Path(f"{path}.{number}.{kind}") for kind in ("out", "err", "code"))
        status = int(code.read_text()) if code.exists() else -1  # -1: it died without a word
        results.append((status, out.read_text(), err.read_text()))
    return results


DRIVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import models
import train

nets = []
def build(names, *_):
    layers = nn.Linear(3072, 32), nn.GELU(), nn.Linear(32, len(names))
    nets.append(nn.Sequential(nn.Flatten(), *layers))
    return nets[-1]
train.MODELS["mlp"] = build, models.RECIPE | {"batch_size": 40}
try:
    code = train.main(sys.argv[3:])
except SystemExit as end:
    code = end.code
state = {name: t.clone() for name, t in nets[0].state_dict().items()} if nets else {}
torch.save(state, os.path.join(sys.argv[2], "rank" + os.environ["RANK"] + ".pt"))
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


def two_ranks(folder, images, *flags, count=2, code=0):
    """train.py on several ranks, without torchrun, which takes four seconds to start.

    Returns the summary, the lines of metrics.jsonl and each rank's weights.
    """
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    defaults = {
        "--model": "mlp", "--dataset": "cifar10", "--data-dir": images, "--device": "cpu",
        "--batch-size": 48, "--precision": "fp32", "--adam-eps": 1e-2, "--log-every": 1,
        "--max-steps": 12, "--out-dir": folder / "run",
    }
    argv = [str(flag) for flag in flags]
    for flag, value in defaults.items():
        if flag not in argv:
            argv += [flag, str(value)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(driver), str(ROOT), str(folder), *argv]
        processes.append(subprocess.Popen(command, env=environment, cwd=folder, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        printed = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [code] * count, "\n".join(err[-2000:] for _, err in printed)
    text = (folder / "run" / "metrics.jsonl").read_text()
    weights = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(count)]
    summary = json.loads(printed[0][0].strip().splitlines()[-1])
    others = [line for out, _ in printed[1:] for line in out.splitlines()]
    # torch 2.9's gloo says on every rank that it is connected
    assert not [line for line in others if not line.startswith("[Gloo]")], "rank 0 alone prints"
    return summary, [json.loads(line) for line in text.splitlines()], weights


def events(lines, kind):
    return [line for line in lines if line.get("event") == kind]
