"""
What `python autopsy SCRIPT` costs: time of a training step under autopsy, beside the same script
alone.

    python bench/watch_cost.py          # about 3 minutes on 2 CPU cores

The script trains a transformer of 10.7 million parameters, or a network of eight convolutions with
BatchNorm (`--model conv`), with AdamW, and prints the seconds of each step. It runs as a process of
its own, alone and under autopsy in turns. A ratio is that of the two medians of one turn; the first
steps of each run, in which memory is allocated, do not count.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record

TURNS = {"cpu": 7, "cuda": 5}
WAYS = {"alone": ["script.py"], "watched": [str(record.ROOT / "autopsy"), "script.py"]}
SCRIPT = '''
import time, torch
torch.manual_seed(0)
device = "DEVICE"
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


def steps(command, folder):
    """(the losses as printed, median seconds of a step)."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 2]
    rows = [row for row in rows if row[0].replace(".", "").isdigit()]
    return [loss for loss, _ in rows], statistics.median(float(seconds) for _, seconds in rows[4:])


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--clock", choices=("perf_counter", "process_time"),
                        default="perf_counter",
                        help="process_time: of the CPU, where other work runs beside it")
    args = parser.parse_args()
    turns, count, batch = (1, 6, 2) if args.smoke else (TURNS[args.device], 20, 16)
    name = "watch_cost" + ("" if args.model == "transformer" else f"_{args.model}")
    head = record.begin(name, args)
    rounds = head.setdefault("samples", [])
    with tempfile.TemporaryDirectory() as folder:
        script = SCRIPT.replace("MODEL", MODELS[args.model]).replace("CLOCK", args.clock)
        script = script.replace("DEVICE", args.device)
        script = script.replace("BATCH", str(batch)).replace("STEPS", str(count))
        Path(folder, "script.py").write_text(script)
        for turn in range(len(rounds), turns):
            printed, seconds = {}, {}
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                printed[way], seconds[way] = steps([sys.executable, *WAYS[way]], folder)
            assert len(printed["alone"]) == count
            assert printed["alone"] == printed["watched"], "autopsy changed a printed figure"
            rounds.append(seconds)
            print(f"turn {turn + 1}: seconds a step {seconds}")
            record.keep(head, args)
    head["watched / alone"] = record.ratio(rounds, "watched", "alone")
    head["printed figures"] = "the same"
    record.write(head, args, ("samples",))


if __name__ == "__main__":
    main()
