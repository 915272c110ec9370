"""
A Swin that overflows in fp16: the stock loop dies of it, train.py heals it. And what it costs.

    python bench/died_and_healed.py --data-dir CIFAR10_FOLDER      3 minutes on two cores
    python bench/died_and_healed.py --data-dir CIFAR10_FOLDER --whole    8 more: whole runs

Swin V1 with its attention as published, logits in half precision. Its first block starts with
queries and keys that have grown, so that the largest logit is some way below 65504; training
itself then pushes it across. `died` is the loop of PyTorch's AMP tutorial: autocast, GradScaler,
unscale_, clip_grad_norm_, AdamW. `healed` is train.py with default flags. Same start, same
batches, same learning rates. --whole: two epochs by train.py, in fp16 and in fp32, two seeds; the
noise is what two seeds in fp32 differ by.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
import optim
from bench import record
from data.batches import TrainBatches
from models import MODELS, RECIPE, swin, wrap

BATCH, LR, STEPS, GROWN = 64, 6e-3, 300, 142.0
KEPT = ("epoch", "train_loss", "val_loss", "val_acc1")


def build(names, size, grown=GROWN):
    net = MODELS["swin-test"][0](names, size)
    attentions = [m for m in net.modules() if isinstance(m, swin.WindowAttention)]
    for attention in attentions:
        attention.fp32_logits = False
    queries = attentions[0].qv.weight.data.chunk(2)[0]
    for projection in (attentions[0].k.weight.data, queries):
        projection.mul_(grown)
    return net


def stock(model, stream, device):
    """(losses, loss scales) of the tutorial's loop; a NaN is written as None."""
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.99), weight_decay=0.05)
    factors = optim.warmup_cosine(STEPS, STEPS // 5, kind="linear").tolist()
    scaler, losses, scales = torch.amp.GradScaler(device.type), [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * factors[step]
        with torch.autocast(device.type, torch.float16):
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


def events(lines, *kinds):
    return [line for line in lines if line.get("event") in kinds]


def died_and_healed(args, device, flags):
    images, labels = data.load("cifar10", args.data_dir, iter).train
    torch.manual_seed(0)
    net = build([str(i) for i in range(10)], 32, args.grown).to(device)
    stream = TrainBatches(images, labels, batch_size=BATCH, device=device)
    died, scales = stock(wrap(net), stream, device)
    flags |= {"precision": "fp16", "max-steps": STEPS, "log-every": 1}
    _, end, lines = record.train_run(flags)
    logged = {line["step"]: line for line in lines if "grad_norm" in line and "event" not in line}
    losses = [logged[step]["loss"] for step in sorted(logged)]
    first = next((step for step, loss in enumerate(died, 1) if loss is None), None)
    print(
        f"stock loop: first non-finite loss at step {first}, {died.count(None)} of {STEPS}, "
        f"scale {scales[-1]:g}; train.py: {end['skipped']} skipped, healed {end['healed']}"
    )
    return {
        "died": died,
        "died_scales": scales,
        "end": end,
        "healed": [loss if isinstance(loss, float) else None for loss in losses],
        "healed_scales": [logged[step]["scale"] for step in sorted(logged)],
        "events": events(lines, "skip", "cure"),
    }


def whole(args, flags):
    for seed in range(args.seeds):
        for precision in ("fp32", "fp16"):
            flags |= {"precision": precision, "seed": seed, "epochs": 2}
            _, end, lines = record.train_run(flags)
            print(
                f"{precision}  seed {seed}  accuracy {end['val_acc1']:.2f} %  skipped "
                f"{end['skipped']}  healed {end['healed']}",
                flush=True,
            )
            epochs = [{key: line[key] for key in KEPT} for line in lines if "train_loss" in line]
            yield {
                "precision": precision,
                "seed": seed,
                "end": end,
                "epochs": epochs,
                "events": events(lines, "skip", "cure", "spike"),
            }


def main(argv=None):
    parser = record.arguments(__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--whole", action="store_true", help="whole runs instead, fp16 and fp32")
    parser.add_argument("--seeds", type=int, default=2, help="of --whole")
    parser.add_argument("--grown", type=float, default=GROWN)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    MODELS["swin-published"] = (lambda names, size: build(names, size, args.grown),
                                RECIPE | {"lr": LR})  # fmt: skip
    flags = {
        "model": "swin-published",
        "dataset": "cifar10",
        "data-dir": args.data_dir,
        "device": args.device,
        "batch-size": BATCH,
    }
    name = "healed_whole_run" if args.whole else "died_and_healed"
    head = record.header(name, args) | {"lr": LR, "batch_size": BATCH}
    if args.whole:
        head["runs"] = list(whole(args, flags))
    else:
        head |= died_and_healed(args, device, flags)
    long = ("runs", "died", "died_scales", "healed", "healed_scales", "events")
    record.write(head, args, samples=long)


if __name__ == "__main__":
    main()
