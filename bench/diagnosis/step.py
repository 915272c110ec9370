"""
What a case is made of: a training step that goes bad, and the answer that its report gives.

    @case("backward", "https://github.com/...", "divergence", module="", op="sqrt", samples=(1,),
          fix="guard")
    def where_does_not_stop_sqrt():
        ...
        return Step(net, batches, loss)

README.md says what each word of the answer means.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Step:
    """One training step: `loss(net, *batch)` of every micro-batch, under autocast to `half` if that
    is given.
    """

    net: nn.Module
    batches: list[tuple]
    loss: Callable[..., Tensor]
    half: torch.dtype | None = None
    scale: float = 1.0
    state: dict | None = None  # of an optimizer
    num_classes: int | None = None
    pure: bool = False  # the weights themselves are in half

    @property
    def precision(self):
        return {None: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[self.half]

    def run(self, batch, fp32=False):
        """Forward and backward of one micro-batch, as autopsy.examine wants it."""
        if self.pure and fp32:
            net = copy.deepcopy(self.net).float()
            loss = self.loss(net, *(x.float() for x in batch))
            loss.backward()
            return loss, {name: p.grad for name, p in net.named_parameters()}
        with torch.autocast(
            "cpu", self.half, enabled=self.half is not None and not fp32 and not self.pure
        ):
            loss = self.loss(self.net, *batch).float()
        (loss * (1.0 if fp32 else self.scale)).backward()
        return loss


@dataclass(frozen=True)
class Case:
    """A step and the right answer. What is None is not asked."""

    kind: str
    cite: str
    verdict: tuple[str, ...]
    make: Callable[[], Step]
    file: str
    lines: tuple[int, ...]  # the guilty ones
    module: tuple[str, ...] | None = None
    op: tuple[str, ...] | None = None
    samples: tuple[int, ...] | None = None
    micro_batch: int | None = None
    names: str | None = None
    fix: tuple[str, ...] | None = None

    def build(self):
        """The step, fresh: the same one each time."""
        torch.manual_seed(0)
        return self.make()


def case(kind, cite, verdict, **asked):
    """The decorator that makes a case of a function. "a|b" in an answer: either is right."""
    for what in {"module", "op", "fix"} & asked.keys():
        asked[what] = tuple(asked[what].split("|"))

    def of(make):
        text, first = inspect.getsourcelines(make)
        guilty = tuple(first + i for i, line in enumerate(text) if line.endswith("# <- guilty\n"))
        file = Path(inspect.getsourcefile(make)).name
        return Case(kind, cite, tuple(verdict.split("|")), make, file, guilty, **asked)

    return of


def cases_of(module):
    """{name: case} of a module of cases, in their order."""
    return {name: case for name, case in vars(module).items() if isinstance(case, Case)}


# --- What the cases are made of


class Net(nn.Module):
    """Children by name, and a forward that is written in the case: there stands the guilty line."""

    def __init__(self, body, **children):
        super().__init__()
        self.body = body
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args):
        return self.body(self, *args)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(n=4):
    return torch.arange(n) % 3


def identity(width, gain=1.0):
    """y = gain * x: the case says what the next operation gets."""
    layer = nn.Linear(width, width, bias=False)
    layer.weight.data = gain * torch.eye(width)
    return layer


def filled(wide, out, value):
    layer = nn.Linear(wide, out, bias=False)
    layer.weight.data.fill_(value)
    return layer


def mean(net, *batch):
    return net(*batch).float().mean()


def cross(net, x, y):
    return F.cross_entropy(net(x).float(), y)


def weighted(net, *batch):
    """A loss with another slope for every output."""
    out = net(*batch).float()
    return (out * numbers(*out.shape, seed=9)).mean()
