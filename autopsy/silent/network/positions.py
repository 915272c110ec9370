"""
Positions: does a network count positions along the batch?

torch.arange(x.size(0)) numbers the samples where x is (batch, time), and pe[: x.size(0)] takes the
rows of a table in their order: each token of a sequence then has one position, and nothing fails.
In two steps of training the functions of a network are followed. It is told if such positions are
added to [n, t, d], of which attention compares the t and nothing compares the n, if nothing numbers
the t, if what comes last has a row for each sample or token, and if the table has room for more
than n: agents, tasks and series that have an embedding each fill their table. Rows of a parameter
that are taken by a slice must be called positions.
"""

import re

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...frames import call_at, line_now, script_frames_now
from ...modes import is_compiled
from ...tensors import flat_tensors
from ...watch.events import Events
from ...watch.following import Follower

LOOKS = (1, 4)  # steps
VIEWS = ("unsqueeze", "view", "reshape", "expand", "expand_as", "to", "long", "repeat", "transpose",
         "requires_grad_", "detach", "type_as", "clone", "contiguous", "getitem")  # fmt: skip
ADDS = ("add", "radd", "iadd")
CALLED = re.compile(r"pos|place|\bpe\b|time|wave|step|order", re.I)
ATTENTION = ("multi_head_attention_forward", "scaled_dot_product_attention", "softmax")


class Positions(Events):
    """Networks that are given sequences."""

    recorded_only = True

    def __init__(self, watch):
        self.recorder = watch.recorder
        self.open = []  # what the networks of this step have done
        self.found = {}  # line: {step: sentence}

    def during(self, call, args, kwargs):
        module = call.function
        if not (call.grad and module.training and self.recorder.steps in LOOKS):
            return ()

        given = [t for t in flat_tensors((args, kwargs)) if not t.is_nested and t.dim() > 1]
        samples, steps = given[0].shape[:2] if given else (0, 0)
        unlike = samples != steps and min(samples, steps) > 1
        if not unlike or is_compiled([*module.modules()]):
            return ()

        self.open.append(Followed(samples, steps))
        return [self.open[-1]]

    def passed(self):
        for seen in self.open:
            for line, text in seen.added if seen.is_along_time else ():
                self.found.setdefault(line, {})[self.recorder.steps] = text
        self.open = []

    def over(self):
        self.open = []

    def sentences(self):
        yield from [found[LOOKS[0]] for found in self.found.values() if len(found) == len(LOOKS)]


class Followed(Follower):
    """Follows positions along the first dimension of what is [samples, steps]."""

    def __init__(self, samples, steps):
        super().__init__()
        self.samples, self.steps = samples, steps
        self.counted = WeakIdKeyDictionary()  # 0 to n - 1, or rows of a table in this order
        self.rows = WeakIdKeyDictionary()
        self.added = []  # (line, sentence)
        self.over_steps = self.over_samples = False  # does attention compare these?
        self.numbers_steps = False
        self.last = 0  # rows of the last result that is no single number

    @property
    def is_along_time(self):
        compares = self.over_steps and not (self.over_samples or self.numbers_steps)
        return compares and self.last in (self.samples, self.samples * self.steps)

    def function_called(self, func, name, args, kwargs, out):
        name = name.strip("_")
        if isinstance(out, torch.Tensor) and out.dim():
            self.last = len(out)
        if name in ("arange", "linspace"):
            self.numbers_steps |= out.shape == (self.steps,)
            first = args[0] if len(args) > 1 else kwargs.get("start", 0)
            if out.shape == (self.samples,) and first == 0 and not out.requires_grad:
                self.counted[out] = line_now()
        elif name in ("getitem", "narrow") and self._takes_first(args[0], out, self.samples):
            code = call_at(*script_frames_now()[0][:2])
            if not isinstance(args[0], torch.nn.Parameter) or CALLED.search(code):
                self.rows[out] = line_now()
        elif name in ("getitem", "narrow") and self._takes_steps(args[0], out):
            self.numbers_steps = True
        elif name in ("embedding", "index_select", "getitem") and self._is_looked_up(args):
            self.rows[out] = next(self.counted[t] for t in flat_tensors(args) if t in self.counted)
        elif name in VIEWS and args[0] in self.counted:
            self.counted[out] = self.counted[args[0]]
        elif name in VIEWS and args[0] in self.rows:
            self.rows[out] = self.rows[args[0]]
        elif name in ADDS:
            self._look_at_sum(*args[:2])
        elif name in ATTENTION:
            self._look_at_attention(name, args[0])
        elif name in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
            self.over_samples = True  # which of the two is not asked

    def _takes_first(self, table, out, n):
        """table[:n] of weights or a buffer: more than n rows of numbers."""
        return (
            isinstance(table, torch.Tensor) and table.is_floating_point() and table.grad_fn is None
            and table.dim() in (2, 3) and (table.dim() == 2 or table.shape[1] == 1)
            and out.shape == (n, *table.shape[1:]) and n < len(table)
            and out.storage_offset() == table.storage_offset()
        )  # fmt: skip

    def _takes_steps(self, table, out):
        """table[:t], or table[:, :t]."""
        wide = table.dim() == 3 and len(table) == 1 and out.dim() == 3
        table, out = (table[0], out[0]) if wide else (table, out)
        return self._takes_first(table, out, self.steps) or table.shape[:1] == (self.steps,)

    def _is_looked_up(self, args):
        """Rows of a table with more than n."""
        tables = [t for t in flat_tensors(args) if t.is_floating_point()]
        counted = any(t in self.counted for t in flat_tensors(args))
        return counted and len(tables) == 1 and len(tables[0]) > self.samples

    def _look_at_sum(self, a, b):
        for rows, other in ((a, b), (b, a)):
            if not isinstance(rows, torch.Tensor):
                continue
            of_steps = rows.dim() > 1 and rows.shape[-2] == self.steps
            if of_steps and rows.shape[:-2] in ((), (1,)):
                self.numbers_steps = True  # the same for all samples
            if rows in self.rows:
                self._added(rows, other)

    def _added(self, rows, other):
        """Rows of a table are added to `other`."""
        shape = [*other.shape]
        wide = len(shape) == 3 and shape[:2] == [self.samples, self.steps]
        same = rows.dim() == 3 and (rows.shape[1] == 1 or rows.stride()[1] == 0)
        if wide and same and len(rows) == self.samples:
            line = self.rows[rows]
            text = (
                f"the positions at {line} number the {self.samples} samples of the batch, and "
                f"attention compares the {self.steps} steps of {shape}: all steps of a sequence "
                "have one position: use size(1) in place of size(0)"
            )
            self.added.append((line, text))

    def _look_at_attention(self, name, t):
        shape = t.shape
        if name == "softmax":
            square = t.dim() > 2 and shape[-1] == shape[-2]
            length = shape[-1] if square else 0
        elif name == "scaled_dot_product_attention":
            length = shape[-2]
        else:  # multi_head_attention_forward: (time, batch, features)
            length = shape[0]
        self.over_steps |= length == self.steps
        self.over_samples |= length == self.samples
