"""
What `python autopsy SCRIPT` costs: time of a training step under autopsy, beside the same script
alone.

    python bench/watch_cost.py          # about 12 minutes on 2 CPU cores

A transformer of 10.7 million parameters, and four kinds of small steps: an MLP, a cart-pole with a
policy gradient (rl), an ODE solver (ode), a recurrent loop in Python (rnn), each with AdamW.
`--model` takes one of them, or a network of eight convolutions with BatchNorm (conv). A script runs
as a process of its own, and prints the seconds of each step. A ratio is that of the two means of
one turn: only some of the small steps are recorded. The first four steps of each run, in which
memory is allocated, do not count.

The transformer takes all cores: alone and under autopsy it runs in turns, and a third time with a
copy of autopsy that lacks silent/: what do these checks cost? On a GPU it alone runs. Small steps
take one core. A machine that is shared changes its speed within seconds, so both processes of a
turn run at the same time, on a core each, and exchange the cores at the next turn.
"""

import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record

TURNS = {"cpu": 4, "cuda": 5}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
WAYS = {
    "alone": ["script.py"],
    "watched": [str(record.ROOT / "autopsy"), "script.py"],
    "without silent/": ["torn/autopsy", "script.py"],
}
SCRIPT = """
import time, torch
torch.manual_seed(0)
device = "DEVICE"
MODEL
net = net.to(device)
optimizer = torch.optim.AdamW(net.parameters())
x, y = x.to(device), y.to(device)
for step in range(STEPS):
    began = time.CLOCK()
    loss = LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{loss.item():.6f} {time.CLOCK() - began:.6f}")
"""

CLASSIFIER = "torch.nn.functional.cross_entropy(net(x).reshape(len(y), 10), y)"
LOSSES = {"rl": "episode()", "ode": "(solve(x) - y).abs().mean()"}
STEPS = {"mlp": 20000, "rl": 3000, "ode": 4000, "rnn": 4000}  # of a run: twenty seconds

MODELS = {
    "transformer": """
layer = torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 6), torch.nn.Linear(384, 10))
x, y = torch.randn(BATCH, 64, 384), torch.randint(0, 10, (BATCH * 64,))
""",
    "conv": """
layers, width = [], 3
for k, wider in enumerate((32, 32, 64, 64, 128, 128, 256, 256)):
    layers += [torch.nn.Conv2d(width, wider, 3, 1 + k % 2, 1), torch.nn.BatchNorm2d(wider),
               torch.nn.ReLU()]
    width = wider
net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(256 * 4, 10))
x, y = torch.randn(4 * BATCH, 3, 32, 32), torch.randint(0, 10, (4 * BATCH,))
""",
    "mlp": """
net = torch.nn.Sequential(torch.nn.Linear(4, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84),
                          torch.nn.ReLU(), torch.nn.Linear(84, 10))
x, y = torch.randn(128, 4), torch.randint(0, 10, (128,))
""",
    "rl": """
import math
net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
x = y = torch.zeros(1)

def moved(state, push):  # a cart-pole
    x, v, angle, turn = state
    force = 10.0 if push else -10.0
    part = (force + 0.05 * turn * turn * math.sin(angle)) / 1.1
    bend = 9.8 * math.sin(angle) - math.cos(angle) * part
    bend /= 0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
    push = part - 0.05 * bend * math.cos(angle) / 1.1
    return x + 0.02 * v, v + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * bend

def episode():
    state, logs = (0.0, 0.0, 0.01, 0.0), []
    while len(logs) < 50 and abs(state[2]) < 0.2:
        policy = torch.distributions.Categorical(logits=net(torch.tensor(state)))
        action = policy.sample()
        logs.append(policy.log_prob(action))
        state = moved(state, action.item())
    returns = torch.arange(len(logs), 0, -1.0) / 50
    return -(torch.stack(logs) * returns).mean()
""",
    "ode": """
net = torch.nn.Sequential(torch.nn.Linear(2, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
x, y = torch.randn(20, 2), torch.randn(20, 2)

def solve(y, h=0.05):
    for _ in range(10):  # Runge and Kutta
        a = net(y ** 3)
        b = net((y + h * a / 2) ** 3)
        c = net((y + h * b / 2) ** 3)
        d = net((y + h * c) ** 3)
        y = y + h * (a + 2 * b + 2 * c + d) / 6
    return y
""",
    "rnn": """
class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.GRUCell(16, 64), torch.nn.Linear(64, 10)

cells = Recurrent()
def net(x):
    h = torch.zeros(x.shape[1], 64)
    for row in x:
        h = cells.cell(row, h)
    return cells.head(h)
net.to, net.parameters = lambda device: net, cells.parameters
x, y = torch.randn(30, 32, 16), torch.randint(0, 10, (32,))
""",
}


def steps(command, folder, cores):
    """(the losses as printed, mean seconds of a step) of a process that may use these cores."""
    only = functools.partial(os.sched_setaffinity, 0, cores) if cores else None
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True,
                          preexec_fn=only)  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 2]
    rows = [row for row in rows if row[0].replace(".", "").isdigit()]
    return [loss for loss, _ in rows], statistics.mean(float(second) for _, second in rows[4:])


def main(argv=None):
    parser = record.arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    parser.add_argument(
        "--clock",
        choices=("perf_counter", "process_time"),
        default="perf_counter",
        help="process_time: of the CPU, where other work runs beside it",
    )
    args = parser.parse_args(argv)
    turns, batch = (1, 2) if args.smoke else (TURNS[args.device], 16)
    kinds = ["transformer", *STEPS] if args.device == "cpu" else ["transformer"]
    kinds = [args.model] if args.model else kinds
    head = record.begin("watch_cost" + (f"_{args.model}" if args.model else ""), args)
    rounds = head.setdefault("samples", [])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            record.ROOT / "autopsy",
            Path(folder, "torn", "autopsy"),
            ignore=shutil.ignore_patterns("silent"),
        )
        for turn in range(len(rounds), turns):
            rounds.append({})
            for kind in kinds:
                count = 6 if args.smoke else STEPS.get(kind, 20)
                script = SCRIPT.replace("MODEL", MODELS[kind]).replace("CLOCK", args.clock)
                script = script.replace("LOSS", LOSSES.get(kind, CLASSIFIER))
                script = script.replace("DEVICE", args.device)
                script = script.replace("BATCH", str(batch)).replace("STEPS", str(count))
                Path(folder, "script.py").write_text(script)
                ways = list(WAYS)[: 2 if kind in STEPS else 3][:: 1 if turn % 2 else -1]
                cores = [{core} for core in CORES[:2]] if kind in STEPS else []
                together = len(cores) == 2
                with ThreadPoolExecutor(2 if together else 1) as pool:
                    commands = [[sys.executable, *WAYS[way]] for way in ways]
                    cores = cores if together else [None] * len(ways)
                    answers = [*pool.map(steps, commands, [folder] * len(ways), cores)]
                printed = [losses for losses, _ in answers]
                assert len(printed[0]) == count
                assert printed.count(printed[0]) == len(ways), "autopsy changed a printed figure"
                row = {f"{kind} {way}": s for way, (_, s) in zip(ways, answers, strict=True)}
                print(f"turn {turn + 1}: seconds a step {row}", flush=True)
                rounds[-1] |= row
            record.keep(head, args)
    ratios = {kind: record.ratio(rounds, f"{kind} watched", f"{kind} alone") for kind in kinds}
    head["watched / alone"] = ratios
    if "transformer" in kinds:
        checks = record.ratio(rounds, "transformer watched", "transformer without silent/")
        head["transformer: watched / without silent/"] = checks
    small = [spread["median"] for kind, spread in ratios.items() if kind in STEPS]
    head["small steps"] = {"mean": statistics.mean(small), "worst": max(small)} if small else {}
    head["printed figures"] = "the same"
    record.write(head, args, ("samples",))


if __name__ == "__main__":
    main()
