"""
How long a checkpoint holds up the loop: cifarnet, saved every BLOCK steps against never, in turns.

    python bench/save_stall.py          # about 2 minutes on 2 CPU cores, 20 seconds on a GPU

Blocks of training steps take turns: one kind ends with a save of model, optimizer and average in
the background, as in train.py, the other does not. The bench times the call to save() itself (the
snapshot) and the whole block, in which the writer of the save before may still compete for the
processor. train.py saves once an epoch, 195 steps of this size; so does this on a GPU, where 10
steps take less time than the disk, and save() would wait for the file before. On a CPU it is every
10 steps. An untimed save allocates the snapshot's memory first.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import checkpoint
import optim
from bench import record
from extras import ema
from models.cifarnet import PRESETS, CifarNet


def main():
    args = record.arguments(__doc__).parse_args()
    device, cuda = args.device, args.device == "cuda"
    count, steps = (2, 2) if args.smoke else (8, 195) if cuda else (12, 10)
    x = torch.randn(8 if args.smoke else 256, 3, 32, 32, device=device)
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, x.shape[:1], device=device)
    net = CifarNet(**PRESETS["cifarnet"]).to(device, memory_format=torch.channels_last)
    optimizer = optim.ClippedAdamW(optim.param_groups(net))
    weights = list(net.parameters())
    average = ema.EMA(weights, 0.99)

    def block(files):
        began = time.perf_counter()
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16):
                logits = net(x)
            F.cross_entropy(logits.float(), y).backward()
            average.update(weights, optimizer.step().found_inf)
            optimizer.zero_grad()
        record.wait(x.device)
        stalled = time.perf_counter()
        if files:
            parts = {"model": net, "optimizer": optimizer, "average": average}
            files.save({name: part.state_dict() for name, part in parts.items()}, 1, good=True)
        ended = time.perf_counter()
        return ended - began, ended - stalled

    head = record.begin("save_stall", args)
    rounds = head.setdefault("samples", [])
    with tempfile.TemporaryDirectory() as folder:
        files = checkpoint.Checkpoints(folder)
        block(files)
        files.wait()
        while len(rounds) < count:
            without, _ = block(None)
            block_with, save = block(files)
            rounds.append({"without": without, "with": block_with, "save": save})
            record.keep(head, args)
        files.wait()
        size = files.last.stat().st_size
    share = record.ratio(rounds, "save", "without")
    ratio = record.ratio(rounds, "with", "without")
    print(
        f"a save of {size / 2**20:.0f} MB holds the loop for {share['median']:.2%} of {steps} "
        f"steps; a block with its save takes {ratio['median']:.4f} of one without (n = {count})"
    )
    head |= {"bytes": size, "save / block": share, "block ratio": ratio}
    record.write(head, args, samples=("samples",))


if __name__ == "__main__":
    main()
