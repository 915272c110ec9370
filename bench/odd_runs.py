"""
Odd runs: 69 that look lost and are healthy, and 60 that are lost with finite numbers.

    python bench/odd_runs.py                       all of them, a few minutes on two cores
    python bench/odd_runs.py "one class" "rate 0"  these

A watch that cries wolf is switched off, and one that never does is none. So a healthy run must end
"done" without a cure. train.py must notice a lost one: it ends "diverged", or `warnings` in its
last line hold a sentence. Most rows train a small network with a frozen norm, a zero bias, Muon and
two rates, on images of 8 x 8 pixels that it learns within a few epochs.
"""

import copy
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from bench import record
from data import Dataset, batches, synthetic
from models import MODELS, RECIPE

BASE = (
    "--model small --dataset synthetic --batch-size 64 --max-steps 60 --precision fp32 --device cpu"
)


class Small(nn.Sequential):
    def __init__(self, names, size, drop=0.0):
        super().__init__(OrderedDict(
            flat=nn.Flatten(), body=nn.Linear(3 * size * size, 32), norm=nn.BatchNorm1d(32),
            act=nn.ReLU(), middle=nn.Linear(32, 32), act2=nn.ReLU(), drop=nn.Dropout(drop),
            head=nn.Linear(32, len(names)),
        ))  # fmt: skip
        self.norm.weight.requires_grad_(False)
        nn.init.zeros_(self.head.bias)


def linear(names, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, len(names)))


def frozen_backbone(names, size):
    net = Small(names, size).requires_grad_(False)
    net.head.requires_grad_(True)
    return net


def norms_only(names, size):
    net = Small(names, size).requires_grad_(False)
    net.norm.requires_grad_(True)
    return net


def with_a_spare_layer(names, size):
    net = Small(names, size)
    net.head.register_parameter("spare", nn.Parameter(torch.ones(3)))
    return net


def dropped(names, size):
    return Small(names, size, drop=0.9)


SMALL = RECIPE | {"lr": 1e-2, "lr_scale": {"*.bias": 10.0}, "warmup": 0.1, "batch_size": 64,
                  "muon": ["middle.weight"], "augment": "flip"}  # fmt: skip
NETS = (linear, frozen_backbone, norms_only, with_a_spare_layer, dropped)


# --- What is done to images and labels


def patterns(count):
    """Ten classes of 8 x 8 pixels, each a pattern with noise: easy, not at once."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    base = torch.randint(60, 140, (10, 3, 8, 8), generator=generator)
    noise = torch.randint(0, 110, (count, 3, 8, 8), generator=generator)
    return (base[labels] + noise).byte(), labels


def noisy(images, labels, share=0.5):
    wrong = torch.rand(len(labels)) < share
    return images, torch.where(wrong, torch.randint(0, 10, labels.shape), labels)


def very_noisy(images, labels):
    return noisy(images, labels, 0.9)


def random_labels(images, labels):
    return noisy(images, labels, 1.0)


def imbalanced(images, labels):
    return images, torch.where(torch.rand(len(labels)) < 0.97, 0, labels)


def one_class(images, labels):
    return images, torch.zeros_like(labels)


def two_classes(images, labels):
    return images, labels % 2


def same_in_class(images, labels):
    first = torch.stack([images[labels == k][0] for k in range(10)])
    return first[labels], labels


def colours(images, labels):
    """Each class has one colour: a linear network comes to a loss of exactly 0."""
    labels = labels % 8
    bits = torch.stack([labels // place % 2 for place in (1, 2, 4)], 1)
    return (bits * 255).to(torch.uint8)[..., None, None].repeat(1, 1, 8, 8), labels


def sorted_by_class(images, labels):
    order = labels.argsort()
    return images[order], labels[order]


def outliers(images, labels):
    """One image in forty is noise with any label: the loss has spikes, and recovers."""
    noise = torch.rand(len(labels)) < 0.025
    images = torch.where(noise.view(-1, 1, 1, 1), torch.randint_like(images, 0, 256), images)
    return images, torch.where(noise, labels.roll(1), labels)


def half_black(images, labels):
    return images * (labels % 2).byte().view(-1, 1, 1, 1), labels


def low_contrast(images, labels):
    return images // 16 + 120, labels


def twenty_images(images, labels):
    return images[:20], labels[:20]


def one_image_a_class(images, labels):
    return images[:10], labels[:10]


def drawn(images, labels):
    return synthetic.draw(len(labels), len(labels), seed=1)


def years(images, labels):
    return images, labels / 10


def small_validation(images, labels):
    return (images, labels) if len(labels) == 700 else (images[:3], labels[:3])


def inverted_validation(images, labels):
    return (images if len(labels) == 700 else 255 - images), labels


def bright_validation(images, labels):
    return (images if len(labels) == 700 else images // 16), labels


def shifted_validation(images, labels):
    return images, labels if len(labels) == 700 else (labels + 1) % 10


def constant_in_training(images, labels):
    return images, labels * (len(labels) != 700)


def shuffled_in_training(images, labels):
    return images, labels[torch.randperm(700)] if len(labels) == 700 else labels


def noise_in_training(images, labels):
    return (torch.randint_like(images, 0, 256) if len(labels) == 700 else images), labels


# --- What strikes a run: strike(run, step, batch), step 0 after the set-up, then before each step.
# It may return another batch.


def at(when, act):
    return lambda run, step, batch: act(run) if step == when else None


def every(act, since=1):
    return lambda run, step, batch: act(run) if step >= since else None


def batch_from(since, change):
    return lambda run, step, batch: change(run, *batch) if step >= since else None


def schedule_0(run, rows=slice(None)):
    run.schedule._table[rows] = 0
    run.schedule._write()


def group_0(run, optimizer):
    """The rate of the optimizer's first group."""
    run.schedule._table[:, 0 if optimizer == 0 else -1] = 0
    run.schedule._write()


def freeze(run, *modules):
    for name in modules:
        getattr(run.net, name).requires_grad_(False)


def detach(run, name="act2"):
    getattr(run.net, name).register_forward_hook(lambda m, args, out: out.detach())


def hook(run, name, change):
    for p in getattr(run.net, name).parameters() if name else run.net.parameters():
        if p.requires_grad:
            p.register_hook(change)


def forget(run, p):
    """It is in no optimizer."""
    for group in run.optimizers[0].param_groups:
        group["params"] = [q for q in group["params"] if q is not p]


def new_head(run):
    run.net.head = nn.Linear(32, 10)


def loss_0(run):
    forward = type(run.model).forward
    run.model.forward = lambda x, y: (lambda loss, metrics: (loss * 0 + loss.detach(), metrics))(
        *forward(run.model, x, y)
    )


def no_step(run):
    for optimizer in run.optimizers:
        optimizer.step = lambda: None


@torch.no_grad()
def multiply(run, factor, *modules):
    for name in modules:
        for p in getattr(run.net, name).parameters():
            p.mul_(factor)


@torch.no_grad()
def die(run):
    run.net.norm.bias.fill_(-1e4)


@torch.no_grad()
def anew(run):
    for p in run.net.parameters():
        p.copy_(0.1 * torch.randn_like(p))


@torch.no_grad()
def to_bf16(run):
    for p in run.net.parameters():
        p.copy_(p.bfloat16())


def zero_head(run):
    multiply(run, 0, "head")
    freeze(run, "head")


def tiny_logits(run):
    run.net.head.register_forward_hook(lambda m, args, out: out * 1e-9)


def norm_momentum_0(run):
    run.net.norm.momentum = 0.0
    run.net.norm.running_var.fill_(100.0)


def reverse(g):
    return -g


# --- What is written wrongly, or evaluated wrongly


def old_copy(run):
    """The network of the first validation is evaluated each time."""
    copies = []
    forward = type(run.net).forward

    def evaluated(*args):
        if run.net.training:
            return forward(run.net, *args)
        if not copies:
            copies.append(copy.deepcopy(run.net))
            del copies[0].forward
        return copies[0].eval()(*args)

    run.net.forward = evaluated


def other_scores(change):
    """In evaluation the metrics are these."""

    def act(run):
        forward = type(run.model).forward

        def scored(x, y):
            loss, metrics = forward(run.model, x, y)
            return loss, metrics if run.model.training else metrics | change(metrics)

        run.model.forward = scored

    return act


def written(which, change):
    """change(contents, those of the first time) is what is written to this file."""

    def act(run):
        start, seen = run.checkpoints._start, []

        def wrong(path, state, *links):
            if path.name == which:
                seen.append(copy.deepcopy(dict(state)))
                state = change(dict(state), seen[0])
            return start(path, state, *links)

        run.checkpoints._start = wrong

    return at(0, act)


def head_reversed(state, first):
    weights = state.get("model", state)
    weights = weights | {"head.weight": weights["head.weight"] * -3}
    return state | {"model": weights} if "model" in state else weights


def no_moments(state, first):
    return state | {"optimizers": first["optimizers"]}


def validation_exchanged(run):
    images, labels = run.data.val
    run.data.val = images.flip(0), labels.flip(0)


def put_back(run, step, batch):
    if step == 0:
        run.was = run.net.middle.weight.detach().clone()
    elif step % 5 == 0:
        run.net.middle.weight.data.copy_(run.was)


def by_a_share(share):
    """Of each update of the body this share stays."""

    def strike(run, step, batch):
        now = run.net.body.weight.data
        if step > 1:
            now.copy_(run.was + share * (now - run.was))
        run.was = now.clone()

    return strike


def mixed(run, x, y):
    """Mixup with the neighbour, as an augmentation of the images alone."""
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def smoothed(run):
    run.model.label_smoothing = 0.4


def swa(run, step, batch):
    """A mean of the weights of the last steps takes their place near the end, as SWA does."""
    if step == 50:
        run.was = [p.detach().clone() for p in run.net.parameters()]
    if step == 58:
        for p, was in zip(run.net.parameters(), run.was, strict=True):
            p.data.lerp_(was, 0.5)


CHANGES = (
    noisy,
    imbalanced,
    one_class,
    same_in_class,
    colours,
    sorted_by_class,
    outliers,
    random_labels,
    very_noisy,
    two_classes,
    low_contrast,
    half_black,
    small_validation,
    inverted_validation,
    drawn,
)
HEALTHY = {  # name: (flags, what is done to the data, strike, flags of a leg that resumes it)
    **{function.__name__.replace("_", " "): ("", function) for function in CHANGES},
    **{function.__name__.replace("_", " "): ("--batch-size 5", function)
       for function in (twenty_images, one_image_a_class)},
    "batch 1": ("--batch-size 1 --model linear --muon",),
    "batch 2": ("--batch-size 2",),
    **{f"{n} steps": (f"--max-steps {n}",) for n in (1, 2, 12)},
    **{name: (f"--model {name} --max-steps 12 --batch-size 16", drawn)
       for name in ("vit-test", "swin-test", "swin-v2-test", "vmamba-test", "dit-test",
                    "slat_vae-test", "vlm-test", "cifarnet-tiny")},
    "dit, batch 2": ("--model dit-test --batch-size 2", drawn),
    "drop path": ("--model swin-test --drop-path 0.5 --max-steps 12 --batch-size 16", drawn),
    "one class, one step": ("--max-steps 1", one_class),
    "loss 0": ("--model linear --lr 0.02 --max-steps 150", colours),
    "rate 100 times lower": ("--lr 1e-4",),
    "rate 3 times higher": ("--lr 3e-2",),
    "no clipping": ("--clip-grad 0",),
    "clipped to 0.001": ("--clip-grad 1e-3",),
    "weight decay 2": ("--weight-decay 2",),
    "averaged weights": ("--ema 0.9",),
    "ten times the rate, resumed": ("--ckpt-every 30", None, None, "--max-steps 90 --lr 0.1"),
    "a tenth of the rate, resumed": ("", None, None, "--max-steps 90 --lr 1e-3"),
    "bf16, resumed": ("", None, None, "--max-steps 90 --precision bf16"),
    "bf16": ("--precision bf16",),
    "O1": ("--precision O1",),
    "micro-batches": ("--accum-steps 4",),
    "betas 0.5": ("--betas 0.5 0.5",),
    "eps 1e-3": ("--adam-eps 1e-3",),
    "no muon": ("--muon",),
    "amsgrad": ("--amsgrad",),
    "cutout": ("--cutout 4",),
    "the whole set in a batch": ("--batch-size 700",),
    "few images for long": ("--max-steps 300 --batch-size 20", twenty_images),
    "regression": ("--model linear --lr 1e-3", years),
    "warm-up as long as the run": ("--warmup-updates 60",),
    "rate 0 at the start": ("", None, at(0, lambda run: schedule_0(run, slice(10)))),
    "body frozen by rate 0": ("--model frozen_by_rate --muon",),
    **{net.__name__.replace("_", " "): (f"--model {net.__name__} --muon", ) for net in NETS},
    "label smoothing 0.4": ("", None, at(0, smoothed)),
    "mixup": ("", None, batch_from(1, mixed)),
    "weights averaged near the end": ("", None, swa),
    "three epochs": ("--max-steps 33",),
    "averaged weights, resumed": ("--ema 0.9", None, None, "--max-steps 90"),
    "O1, started again": ("", None, None, "--precision O1"),
    "a bias that a norm takes away": ("--no-decay body.bias",),
}  # fmt: skip
LOST = {
    "rate 1e-30": ("--lr 1e-30",),
    "rate 1e-12": ("--lr 1e-12",),
    "rate 1e-9": ("--lr 1e-9",),
    "warm-up without end": ("--warmup-updates 9000000",),
    "clipped to 1e-30": ("--clip-grad 1e-30 --muon",),
    "eps 1e9": ("--adam-eps 1e9 --muon",),
    "rate 0": ("", None, at(0, schedule_0)),
    "rate 0 from step 20": ("", None, at(20, schedule_0)),
    "a group at rate 0": ("", None, at(0, lambda run: group_0(run, 0))),
    "muon at rate 0": ("", None, at(0, lambda run: group_0(run, 1))),
    "dit at rate 1e-30": ("--model dit-test --lr 1e-30 --max-steps 24 --batch-size 16", drawn),
    "head frozen too late": ("", None, at(0, lambda run: freeze(run, "head"))),
    "frozen from step 20": ("", None, at(20, lambda run: freeze(run, "body", "middle"))),
    "body detached": ("", None, at(0, detach)),
    "body detached from step 20": ("", None, at(20, detach)),
    "head in no optimizer": ("", None, at(0, lambda run: forget(run, run.net.head.weight))),
    "muon left out": ("", None, at(0, lambda run: run.optimizers.pop())),
    "a new head": ("", None, at(0, new_head)),
    "gradient 0 in the head": ("", None, at(0, lambda run: hook(run, "head", torch.zeros_like))),
    "gradient 0 in the body from step 20": (
        "",
        None,
        at(20, lambda run: hook(run, "body", torch.zeros_like)),
    ),
    "noise for gradients": ("", None, at(0, lambda run: hook(run, "", torch.randn_like))),
    "gradients reversed": ("", None, at(0, lambda run: hook(run, "", reverse))),
    "loss x 0": ("", None, at(0, loss_0)),
    "loss x 0 from step 30": ("", None, at(30, loss_0)),
    "no step": ("", None, at(0, no_step)),
    "no step from step 20": ("", None, at(20, no_step)),
    "head 0 and frozen": ("", None, at(0, zero_head)),
    "no unit lives": ("", None, every(die)),
    "no unit lives from step 30": ("", None, every(die, 30)),
    "head x 1e4": ("", None, at(0, lambda run: multiply(run, 1e4, "head"))),
    "all weights 0": ("", None, at(0, lambda run: multiply(run, 0, "body", "middle", "head"))),
    "logits x 1e-9": ("", None, at(0, tiny_logits)),
    "labels shuffled": ("", shuffled_in_training),
    "labels drawn anew": (
        "",
        None,
        batch_from(1, lambda run, x, y: (x, torch.randint_like(y, 10))),
    ),
    "labels constant": ("", constant_in_training),
    "images all 0": ("", None, batch_from(1, lambda run, x, y: (x * 0, y))),
    "training on noise": ("", noise_in_training),
    "one batch for ever": (
        "--max-steps 120",
        None,
        batch_from(2, lambda run, x, y: (x[:1].repeat(len(x), 1, 1, 1), y[:1].repeat(len(y)))),
    ),
    "all cut out": ("--cutout 16",),
    "validation's labels shifted": ("", shifted_validation),
    "validation normalised otherwise": ("", bright_validation),
    "statistics that never move": ("", None, at(0, norm_momentum_0)),
    "an average that never moves": ("--ema 0.9999999",),
    "weights drawn anew at step 57": ("", None, at(57, anew)),
    "labels shuffled from step 30": ("", None, batch_from(30, lambda run, x, y: (x, y.roll(1)))),
    "updates below bf16": ("--lr 2e-5", None, every(to_bf16)),
    "a layer put back now and then": ("--muon", None, put_back),
    "a layer put back, with muon": ("", None, put_back),
    "a layer moved by a millionth": ("", None, by_a_share(1e-6)),
    "a layer moved by a thousandth": ("", None, by_a_share(1e-3)),
    "an old copy is validated": ("", None, at(0, old_copy)),
    "an accuracy of 99 %": (
        "",
        noisy,
        at(0, other_scores(lambda metrics: {"acc1": torch.full_like(metrics["acc1"], 99.0)})),
    ),
    "a tenth of the loss": (
        "",
        noisy,
        at(0, other_scores(lambda metrics: {"loss": metrics["loss"] / 10})),
    ),
    "validation exchanged": ("", None, at(30, validation_exchanged)),
    "last.pt: head x -3": ("", None, written("last.pt", head_reversed)),
    "last.pt: the first weights": (
        "",
        None,
        written("last.pt", lambda state, first: state | {"model": first["model"]}),
    ),
    "last.pt: the first moments": ("", None, written("last.pt", no_moments)),
    "last.pt: the first average": (
        "--ema 0.9",
        None,
        written("last.pt", lambda state, first: state | {"ema": first["ema"]}),
    ),
    "best.pt: head x -3": ("", None, written("best.pt", head_reversed)),
    "best.pt: the first weights": ("", None, written("best.pt", lambda state, first: first)),
}


def run(name):
    """(status, what was said). A cure is said too."""
    flags, change, strike, resumed = (*(HEALTHY | LOST)[name], None, None, None)[:4]
    torch.manual_seed(0)
    images, labels = patterns(900)
    split = (images[:700], labels[:700]), (images[700:], labels[700:])
    if change:
        split = tuple(change(*part) for part in split)
    classes = [str(k) for k in range(10)]
    if change in (one_class, years):
        classes = ["only"]
    dataset = Dataset("synthetic", *split, classes=classes)
    MODELS["small"] = Small, SMALL
    MODELS["frozen_by_rate"] = Small, SMALL | {"lr_scale": {"body.*": 0.0}}
    for net in NETS:
        MODELS[net.__name__] = net, SMALL | {"muon": []}
    setup, batch_of = train.prepare.setup, batches.TrainBatches.at
    runs = []

    def set_up(run, step):
        setup(run, step)
        runs.append(run)
        if strike:
            strike(run, 0, None)

    def at_step(stream, step):
        batch = batch_of(stream, step)
        struck = strike and runs and strike(runs[-1], step + 1, batch)
        return struck if isinstance(struck, tuple) else batch

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(train.prepare, "load", lambda *args, **options: dataset),
        patch.object(train.prepare, "setup", set_up),
        patch.object(batches.TrainBatches, "at", at_step),
        patch.object(train.report, "draw_curves", lambda path: None),
    ):
        out = {"out-dir": f"{folder}/run"}
        argv = f"{BASE} {flags}".split()
        _, end, lines = record.train_run(out, *argv)
        if resumed and end.get("status") == "done":
            _, end, lines = record.train_run(out, *argv, *f"{resumed} --resume auto".split())
    cures = [line["action"] for line in lines if line.get("event") == "cure"]
    said = [end.get("reason") or end.get("refused") or "", *end.get("warnings", []), *cures]
    return {
        "name": name,
        "status": end.get("status", "refused"),
        "cures": cures,
        "said": [*filter(None, said)],
    }


def is_right(row):
    """A healthy run was left alone, a lost one was noticed."""
    stopped = row["status"] != "done" or row["cures"]
    return bool(stopped or row["said"]) if row["name"] in LOST else not stopped


def main(argv=None):
    parser = record.arguments(__doc__, "cpu")
    parser.add_argument("names", nargs="*", help="default: all rows")
    args = parser.parse_args(argv)
    rows = []
    for name in args.names or LOST | HEALTHY:
        rows.append(run(name))
        right = "" if is_right(rows[-1]) else "  <- WRONG"
        print(f"{name:38}{rows[-1]['status']:10}{'; '.join(rows[-1]['said'])}{right}", flush=True)
    sums = {}
    for kind, names in (("healthy", HEALTHY), ("lost", LOST)):
        own = [row for row in rows if row["name"] in names]
        told = sum(row["status"] == "done" and bool(row["said"]) for row in own)
        sums[kind] = {"n": len(own), "right": sum(map(is_right, own)), "warned": told}
    head = record.header("odd_runs", args)
    record.write(head | sums | {"rows": rows}, args, samples=["rows"])
    return sum(not is_right(row) for row in rows)


if __name__ == "__main__":
    main()
