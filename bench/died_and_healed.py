"""
The README's first picture: a run that dies, and the same run healed.

    python bench/died_and_healed.py [CIFAR10_FOLDER]           # about 3 minutes on 2 cores

Swin V1 with its attention as published, logits in half precision, in fp16. Its first block starts with queries and
keys that have grown, so that the largest logit is some way below 65504; training itself then pushes it across. `died`
is the loop of PyTorch's AMP tutorial: autocast, GradScaler, unscale_, clip_grad_norm_, AdamW. `healed` is train.py with
default flags. Same start, same batches, same learning rates; every loss of both goes into bench/results.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import optim  # noqa: E402
import report  # noqa: E402
import train  # noqa: E402
from data.batches import TrainBatches  # noqa: E402
from models import RECIPE, swin, wrap  # noqa: E402

BATCH, LR = 64, 6e-3


def build(names, size, grown):
    net = train.MODELS["swin-test"][0](names, size)
    attentions = [m for m in net.modules() if isinstance(m, swin.WindowAttention)]
    for attention in attentions:
        attention.fp32_logits = False
    for projection in (attentions[0].k.weight.data, attentions[0].qv.weight.data.chunk(2)[0]):
        projection.mul_(grown)
    return net


def stock(model, stream, steps):
    """(losses, loss scales) of the tutorial's loop; a NaN is written as None."""
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.05)
    factors = optim.warmup_cosine(steps, steps // 5, kind="linear").tolist()
    scaler, losses, scales = torch.amp.GradScaler("cpu"), [], []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * factors[step]
        with torch.autocast("cpu", torch.float16):
            loss, _ = model(*stream.at(step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item() if loss.isfinite() else None)
        scales.append(scaler.get_scale())
    return losses, scales


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--grown", type=float, default=142.0)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    (x, y), val, names, dataset = data.load(None, args.folder, iter)
    data.cifar10.load = lambda *_: ((x, y), (val[0][:500], val[1][:500]), names)
    train.MODELS["swin-published"] = lambda names, size: build(names, size, args.grown), RECIPE | {"lr": LR}

    torch.manual_seed(0)
    model = wrap(build(names, 32, args.grown))
    died, scales = stock(model, TrainBatches(x, y, batch_size=BATCH), args.steps)
    with tempfile.TemporaryDirectory() as folder:
        train.main(["--model", "swin-published", "--dataset", "cifar10", "--precision", "fp16", "--device", "cpu",
                    "--batch-size", str(BATCH), "--max-steps", str(args.steps), "--log-every", "1",
                    "--out-dir", folder])
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "grad_norm" in line and "event" not in line}
    healed = [logged[step]["loss"] if isinstance(logged[step]["loss"], float) else None for step in sorted(logged)]
    events = [line for line in lines if line.get("event") in ("skip", "cure")]
    record = {"bench": "died_and_healed", "dataset": dataset, "steps": args.steps, "grown": args.grown, "lr": LR,
              "batch_size": BATCH, "commit": report.commit(), "torch": str(torch.__version__),
              "hardware": f"{platform.machine()}, CPU", "died": died, "died_scales": scales, "healed": healed,
              "healed_scales": [logged[step]["scale"] for step in sorted(logged)], "events": events, "end": lines[-1]}
    other = "" if dataset == "cifar10" else f"-{dataset}"  # the picture is drawn from CIFAR-10's
    (args.results / f"died_and_healed{other}-cpu.json").write_text(json.dumps(record) + "\n")
    first = next((i + 1 for i, loss in enumerate(died) if loss is None), None)
    print(json.dumps({"bench": "died_and_healed", "died at": first, "never finite again": all(
        loss is None for loss in died[first - 1 :]) if first else False, "scale at its end": scales[-1],
        "healed": lines[-1]["healed"], "skipped": lines[-1]["skipped"], "val_acc1": lines[-1]["val_acc1"]}))


if __name__ == "__main__":
    main()
