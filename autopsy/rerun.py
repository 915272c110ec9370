"""
Rerun: the recorded step once more.

As it was, in fp32, or with every operation watched. Each run begins from the same buffers and
random numbers, and says what was bad first. verdict.py concludes from it.
"""

import traceback
import warnings
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite, nan

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from .frames import first_line_of, frames_in, line_of
from .locator import Locator
from .report import Report
from .tensors import LARGE, STATISTIC, Span, extent, numbers_of


class Rerun:
    """The recorded step, as often as needed, each time from the same buffers and random numbers."""

    def __init__(self, run_step, record, net, about):
        if not record.batches:
            raise ValueError("the record holds no micro-batch: call record.keep(...)")
        self.run_step, self.record, self.net, self.about = run_step, record, net, about
        self.loss_factor, self.last_micro_batch = 1.0, 0
        self.written = []  # buffers that were clean before the micro-batch
        self.spans = {}  # of its loss, gradients and these
        self.trace = None  # of an error, until watch() has read it

    def __call__(self, context=None, fp32=False):
        """Run the step up to the first bad micro-batch. It returns what is bad, or ""."""
        self.record.restore()
        self.error = None
        self.loss, self.gradients = None, {}
        clean = [name for name, b in self.net.named_buffers() if not extent(b).is_bad]
        # Fused attention knows half only; its plain mathematics knows fp32.
        attention = sdpa_kernel(SDPBackend.MATH) if fp32 else nullcontext()
        try:
            with warnings.catch_warnings(), context or nullcontext(), attention:
                warnings.simplefilter("ignore")  # all has been said once
                for k, batch in enumerate(self.record.batches):
                    self.loss, self.gradients = None, {}
                    if isinstance(context, Locator):
                        self.last_micro_batch = k
                        context.take(batch, len(self.record.indices[k]))
                    out = self.run_step(batch, fp32)
                    if not isinstance(out, tuple):
                        out = out, {n: p.grad for n, p in self.net.named_parameters()}
                    self.loss = torch.as_tensor(out[0]).detach()
                    self.gradients = {n: g for n, g in out[1].items() if g is not None}
                    if symptom := self._bad_result(clean):
                        return symptom
        except Exception as error:
            self.trace = error.__traceback__
            if not isinstance(context, Locator):
                self._forget_frames()
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.error = error
            return first_line_of(error)
        return ""

    def _bad_result(self, clean):
        """What the micro-batch made bad, in words: its loss, a gradient, or a buffer that was clean
        before; or ""."""
        buffers = {n: b for n, b in self.net.named_buffers() if n in clean}
        with _disable_current_modes():  # these reads are no part of the step
            spans = {"loss": extent(self.loss)}
            spans |= {f"gradient of {n}": extent(g) for n, g in self.gradients.items()}
            written = {n: extent(b) for n, b in buffers.items()}
        masks = {n for n, span in written.items() if span.is_mask and not STATISTIC.search(n)}
        spans |= {f"buffer {n}": span for n, span in written.items() if n not in masks}
        self.written, self.spans = list(buffers.values()), spans
        return next((f"{what} is {s.bad_end}" for what, s in spans.items() if s.is_bad), "")

    def too_large(self):
        """Of a finite step: which number is so large that its square is not, in words; or ""."""
        norm = sum(float(g.double().norm()) ** 2 for g in map(numbers_of, self.gradients.values()))
        spans = {**self.spans, "the gradient norm": Span(high=norm**0.5)}
        found = (f"{what} is {s.bad_end}" for what, s in spans.items() if s.is_large)
        return next((f"{text}, {LARGE}" for text in found), "")

    def _forget_frames(self):
        """They hold all that the step has computed before it raised, its autograd graph too."""
        traceback.clear_frames(self.trace)
        self.trace = None

    def _raised(self, where):
        """Of a step that raised: what made a bad number among its variables, else what raised."""
        frames = [frame for frame, _ in traceback.walk_tb(self.trace)]
        variables = [v for frame in frames for v in frame.f_locals.values()]
        inner = [frame.f_locals.get("self") for frame in reversed(frames)]
        modules = [where.places.names.get(m) for m in inner if isinstance(m, nn.Module)]
        module = next(filter(None, modules), "")
        line = line_of(frames_in(traceback.format_tb(self.trace)))
        raised = Report(op=type(self.error).__name__, module=module, line=line)
        return where.origin_of(filter(torch.is_tensor, variables)) or raised

    def _factor(self, root):
        """The factor of the loss before its backward. If the step raised, or returned a bad loss:
        the loss scale."""
        loss = nan if self.loss is None else float(self.loss.float().mean())
        if isfinite(root) and root and not isfinite(loss):
            return max(1.0, self.about["scale"])
        return max(1.0, root / loss) if loss else 1.0  # 1 for NaN

    def watch(self, fp32=False):
        """Run it with every operation watched: what is bad, and which operation made it."""
        # Importing _dynamo inside a watched operation would keep the current frames, and all
        # tensors of the step, alive.
        from torch import _dynamo  # noqa: F401

        where = Locator(self.net, named=self.record.named)
        self.locator = where
        with where.functions:
            symptom = self(where, fp32)
        origin = None
        if isinstance(self.error, torch.OutOfMemoryError):
            self._forget_frames()
            raise self.error
        if self.error:
            origin = where.failed or self._raised(where)
            self._forget_frames()
        elif symptom:
            results = [self.loss, *self.gradients.values(), *self.written]
            origin = where.origin_of([self.loss]) or where.origin_of(results)
        self.loss_factor = self._factor(where.functions.root)
        about = {
            "symptom": symptom,
            "error": type(self.error) if self.error else None,
            "micro_batch": self.last_micro_batch,
            "micro_batches": len(self.record.batches),
            **self.about,
        }
        return replace(origin or Report(), **about)
