"""What several test files need: states compared bit for bit, and many scripts in one process."""

import functools
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from amp_policy import Capabilities, choose_policy

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = str(Path(torch.__file__).resolve().parents[1])
FORKS = hasattr(os, "fork")
# `python *HIDDEN SCRIPT ...` runs without what Windows lacks; on Windows: as it is.
HIDDEN = [ROOT / "tests" / "hidden.py"] if FORKS else []
WINGS = (  # CONTRIBUTING.md; each can be deleted with its tests
    "rescue",
    "autopsy",
    "failures",
    "bench",
    "autopsy/silent",
    "autopsy/before",
    "autopsy/describe",
)
numbers = itertools.count()  # of files that scripts print to


def there(*wings):
    """Are all these wings there? Which tests need which: NEEDS in tests/conftest.py."""
    return all((ROOT / wing).is_dir() for wing in wings)


needs_unix = pytest.mark.skipif(not FORKS, reason="needs fork, or bash")
needs_rescue = pytest.mark.skipif(
    not there("rescue", "autopsy"), reason="needs rescue/, which needs autopsy/"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def is_ours(file):
    """Not a package: an environment may lie inside of the repository."""
    return file.startswith(str(ROOT)) and not file.startswith(PACKAGES)


def policy_for(name, device="cpu"):
    """As asked for, neither tried nor timed."""
    return choose_policy(name, Capabilities(device), trial=None, stopwatch=None)


def snapshot(*things):
    """A copy of every tensor in modules, optimizers and nests of tensors."""
    states = [thing.state_dict() if hasattr(thing, "state_dict") else thing for thing in things]
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, states)


def bits(x):
    """What is equal where two tensors or plain values are: a NaN is, 0.0 and -0.0 are not."""
    if not isinstance(x, torch.Tensor):
        return type(x), x
    numbers = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return x.dtype, x.shape, x.device, numbers.numpy().tobytes()


def same(a, b):
    """Two nests of tensors and plain values: the same structure, the same bits."""
    (a, shape_a), (b, shape_b) = tree_flatten(a), tree_flatten(b)
    return shape_a == shape_b and [bits(x) for x in a] == [bits(x) for x in b]


class Operations(TorchDispatchMode):
    """Counts the operations that compute: inside of `with`."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = (
            "view",
            "split",
            "select",
            "unbind",
            "detach",
            "empty_like",
            "_record",
            "_local",
            "transpose",
            "permute",
            "_unsafe",
            "expand",
        )
        self.count += not func._schema.name.split("::")[1].startswith(views)
        return func(*args, **(kwargs or {}))


SERVER = """
import json, os, runpy, signal, sys, traceback
import matplotlib.pyplot, torch, torch._dynamo, torchvision.transforms.v2, tqdm
for line in sys.stdin:
    children = []
    for argv, folder, environment, printed in json.loads(line):
        children.append(os.fork())
        if children[-1]:
            continue
        signal.alarm(1800)  # one that hangs does not outlive the tests for long
        for descriptor, path in enumerate([os.devnull, printed + ".out", printed + ".err"]):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY
            os.dup2(os.open(path, flags), descriptor)
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        sys.orig_argv = [sys.executable, *argv]  # for a script that starts itself again
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
        os._exit(status)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
"""


@functools.cache
def server():
    """A process that has imported torch once for all tests; each script is a fork of it."""
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def run_together(jobs, folder, timeout=1800):
    """Each of `jobs`, (argv, working folder, environment), as `python *argv` runs it, all at once:
    [(exit code, out, err)]. `folder`: for what they print."""
    if not FORKS:
        started = [
            subprocess.Popen(
                [sys.executable, *map(str, argv)],
                cwd=at,
                env={**os.environ, **environment},
                encoding="utf-8",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for argv, at, environment in jobs
        ]
        texts = [process.communicate(timeout=timeout) for process in started]
        return [(process.returncode, *both) for process, both in zip(started, texts, strict=True)]
    printed = [str(Path(folder) / f"printed.{next(numbers)}") for _ in jobs]
    line = [
        ([*map(str, argv)], str(at), environment, file)
        for (argv, at, environment), file in zip(jobs, printed, strict=True)
    ]
    server().stdin.write(json.dumps(line) + "\n")
    server().stdin.flush()
    if not select.select([server().stdout], [], [], timeout)[0]:
        os.killpg(server().pid, signal.SIGKILL)
        server.cache_clear()
        raise TimeoutError(f"{jobs} took over {timeout} s")
    codes = json.loads(server().stdout.readline())
    return [
        (code, Path(f"{file}.out").read_text("utf-8"), Path(f"{file}.err").read_text("utf-8"))
        for code, file in zip(codes, printed, strict=True)
    ]


def run_script(argv, folder):
    """`python *argv` in `folder`: (exit code, out, err)."""
    return run_together([(argv, folder, {})], folder)[0]


def script(folder, text):
    """A script in `folder` that can import what a test can."""
    path = folder / "script.py"
    tests = ROOT / "tests"
    places = tuple(map(str, (ROOT, tests, tests / "rescue", tests / "autopsy")))
    path.write_text(f"import sys\nsys.path[:0] = {places}\n{text}")
    return path


def free_port():
    """Below the ports that the system gives to whoever asks for any: there another process could
    take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def run_ranks(argv, folder, count=2):
    """`argv` on several ranks, without torchrun, which takes four seconds to start."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [
        {**meeting, "WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(count)
    ]
    return run_together([(argv, folder, environment) for environment in environments], folder)


def ranks_agree(folder, text):
    """A script on two ranks that compares what they hold, and prints "agreed" at its end."""
    for code, out, err in run_ranks([script(folder, text)], folder):
        assert code == 0 and out.endswith("agreed\n"), err


def mlp(classes):
    """A network without BatchNorm: its gradient does not depend on how the batch is cut."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.GELU(), nn.Linear(32, classes))


DRIVER = """
import os
import torch
import helpers, models, train
nets = []
def build(names, *_):
    nets.append(helpers.mlp(len(names)))
    return nets[-1]
train.MODELS["mlp"] = build, models.RECIPE | {"batch_size": 40}
try:
    code = train.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
state = {name: t.clone() for name, t in nets[0].state_dict().items()} if nets else {}
torch.save(state, "rank" + os.environ["RANK"] + ".pt")
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


def two_ranks(folder, images, *flags, count=2, code=0):
    """train.py on several ranks.

    Returns the summary, the lines of metrics.jsonl and each rank's weights.
    """
    folder.mkdir(exist_ok=True)
    defaults = {
        "--model": "mlp",
        "--dataset": "cifar10",
        "--data-dir": images,
        "--device": "cpu",
        "--batch-size": 48,
        "--precision": "fp32",
        "--adam-eps": 1e-2,
        "--log-every": 1,
        "--max-steps": 12,
        "--out-dir": folder / "run",
    }
    words = [word for pair in defaults.items() for word in pair]
    ended = run_ranks([script(folder, DRIVER), *words, *flags], folder, count)
    assert [rank[0] for rank in ended] == [code] * count, "\n".join(x[2][-2000:] for x in ended)
    weights = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(count)]
    summary = json.loads(ended[0][1].strip().splitlines()[-1])
    others = [line for _, out, _ in ended[1:] for line in out.splitlines()]
    # torch 2.9's gloo says on every rank that it is connected
    assert not [line for line in others if not line.startswith("[Gloo]")], "rank 0 alone prints"
    return summary, read_lines(folder / "run" / "metrics.jsonl"), weights


def read_lines(metrics):
    """The lines of metrics.jsonl, [] without one."""
    return [json.loads(line) for line in metrics.open()] if metrics.exists() else []


def events(lines, kind):
    return [line for line in lines if line.get("event") == kind]


def last_state(run, out="run"):
    """last.pt of a run of the fixture `run`."""
    return torch.load(run.folder.with_name(out) / "last.pt", weights_only=True)


def refused(answer, *words):
    """A run that says no: one sentence with these words, exit code 2, no summary."""
    code, last, error, _ = answer
    assert code == 2 and last is None and len(error.strip().splitlines()) == 1, error
    assert all(word in error for word in words), error


def rows_of(text):
    """How many rows of a screen of 80 columns it takes."""
    return sum(max(1, -(-len(line) // 80)) for line in text.splitlines())
