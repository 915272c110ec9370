"""
What `python autopsy.py SCRIPT` costs: time of a training step under the watcher, beside the same
script alone.

    python bench/watch_cost.py          # about 3 minutes on 2 CPU cores

The script trains a transformer of 10.7 million parameters, or a network of eight convolutions with
BatchNorm (`--model conv`), with AdamW, and prints the seconds of each step. It runs as a process of
its own, alone and under the watcher in turns. A ratio is that of the two medians of one turn; the
first steps of each run, in which memory is allocated, do not count.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import record  # noqa: E402

SCRIPT = '''
import time, torch
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
MODEL
net = net.to(device)
optimizer = torch.optim.AdamW(net.parameters())
x, y = x.to(device), y.to(device)
for step in range(STEPS):
    began = time.CLOCK()
    loss = torch.nn.functional.cross_entropy(net(x).reshape(len(y), 10), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{loss.item():.6f} {time.CLOCK() - began:.6f}")
'''

MODELS = {
    "transformer": '''
layer = torch.nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 6), torch.nn.Linear(384, 10))
x, y = torch.randn(BATCH, 64, 384), torch.randint(0, 10, (BATCH * 64,))
''',
    "conv": '''
layers, width = [], 3
for k, wider in enumerate((32, 32, 64, 64, 128, 128, 256, 256)):
    layers += [torch.nn.Conv2d(width, wider, 3, 1 + k % 2, 1), torch.nn.BatchNorm2d(wider),
               torch.nn.ReLU()]
    width = wider
net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(256 * 4, 10))
x, y = torch.randn(4 * BATCH, 3, 32, 32), torch.randint(0, 10, (4 * BATCH,))
''',
}


def steps(command: list[str], folder: str) -> tuple[list[str], float]:
    """(the losses as printed, median seconds of a step)."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 2]
    rows = [row for row in rows if row[0].replace(".", "").isdigit()]
    return [loss for loss, _ in rows], statistics.median(float(seconds) for _, seconds in rows[4:])


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--clock", choices=("perf_counter", "process_time"),
                        default="perf_counter",
                        help="process_time: of the CPU, where other work runs beside it")
    parser.add_argument("--note", default="", help="what ran beside it")
    args = parser.parse_args()
    turns, count, batch = (1, 6, 2) if args.smoke else (7, 20, 16)
    alone, watched = [], []
    with tempfile.TemporaryDirectory() as folder:
        script = SCRIPT.replace("MODEL", MODELS[args.model]).replace("CLOCK", args.clock)
        script = script.replace("BATCH", str(batch)).replace("STEPS", str(count))
        Path(folder, "script.py").write_text(script)
        for turn in range(turns):
            ways = [([sys.executable, "script.py"], alone),
                    ([sys.executable, str(ROOT / "autopsy.py"), "script.py"], watched)]
            printed = []
            for command, seconds in ways[:: 1 if turn % 2 else -1]:
                losses, median = steps(command, folder)
                printed.append(losses)
                seconds.append(median)
            assert len(printed[0]) == count
            assert printed[0] == printed[1], "the watcher changed a printed figure"
            ratio = watched[-1] / alone[-1]
            print(f"turn {turn + 1}: alone {alone[-1]:.3f} s a step, watched / alone {ratio:.3f}")
    device = torch.device(args.device)
    ratios = [w / a for w, a in zip(watched, alone, strict=True)]
    name = "watch_cost" + ("" if args.model == "transformer" else f"_{args.model}")
    head = record.header(name, vars(args), device) | {
        "watched / alone": record.spread(ratios), "alone": alone, "watched": watched,
        "printed figures": "the same"}
    if not args.smoke:
        record.write(head, args.results, device, ("alone", "watched"))


if __name__ == "__main__":
    main()
