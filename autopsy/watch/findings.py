"""
Findings: what made the bad number, and what does autopsy report?

explain() repeats the step. stop() ends the script, because the number would reach the weights;
later() keeps the report until the end. checks.py decides whether a number is bad.
"""

import json
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from math import inf
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ..advice import RISES, Advice, Topic, Verdict, advice_on, in_its_words
from ..facts import STATE, Kind
from ..frames import Line, call_at, first_line_of, line_now, line_of, script_frames_now
from ..report import with_rank
from ..tensors import LARGE, extent, few, storage_of
from .calls import buffers_back
from .events import Events
from .functions import ASKS
from .replay import replay, verdict_on_origin

SELECTS = re.compile("isnan|isfinite|nan_to_num|nanmean|nansum")
WAIT = 60  # seconds for the reports of other ranks


class Seen(Enum):
    """How a bad number came to light."""

    COMPUTED = 0  # a loss, a gradient, a weight, ...
    READ = 1  # the script read it
    RAISED = 2  # the script raised an exception


class Read(NamedTuple):
    """A bad number that the script read."""

    made: str  # "nan", "inf", ...
    line: Line
    is_array: bool

    def __str__(self):
        return f"{self.made} at {self.line}" + " (an array)" * self.is_array


class Findings:
    """The reports so far, and the bad numbers that the script read itself."""

    def __init__(self, hooks, recorder, deferred, scaling, history):
        self.hooks, self.recorder, self.deferred = hooks, recorder, deferred
        self.scaling, self.history = scaling, history
        self.silent = Events(None)  # what looks for faults without a NaN
        self.reads = Counter()  # bad numbers that the script has read
        self.infinite = {}  # of those that are inf: a report, or None
        self.knows = -1  # the last step in which it read or asked for one
        self.symptom, self.step, self.reports = "", 0, {}
        self.seen = Seen.COMPUTED
        self.recorded = True  # was the step of the symptom?
        self.doubtful = False  # a second run must see the symptom, too: else it is no finding
        self.about = set()  # Sources that a report is about
        self.rank_of_origin = 0
        self.large = {}  # what holds a finite number beyond LIMIT: the step, the number
        self.falls = False  # whether the loss was large and negative
        self.unasked = {}  # "parameter emb.weight": bad rows that nothing asked for, their origin

    @property
    def text(self):
        """Everything that is known, for the file."""
        return "\n".join(getattr(report, "full", report) for report in self.reports.values())

    # What the script reads

    def read(self, t, name):
        """The script reads this tensor: loss.item(), say."""
        if type(t) not in (Tensor, nn.Parameter) or not t.is_floating_point():
            return
        loss = t.requires_grad and t.numel() == 1
        if t.numel() > 1 << 16 or not (span := extent(t)).is_bad:
            return
        self.knows = self.recorder.steps
        if name in ASKS and not loss:
            return
        frames = script_frames_now()
        code = call_at(*frames[0][:2]) if frames and t.numel() > 1 else ""
        if SELECTS.search(code):  # what is missing is a NaN on purpose
            return
        read = Read(span.bad_end, line_now(), t.numel() > 1)
        made = self.recorder.known.get(t)
        if made and read not in self.reads and read.made == "inf" and not read.is_array:
            self.infinite[read] = self.explain([made.number])
        self.reads[read] += 1
        single = t.numel() == 1 or self.recorder.first == inf  # torch.func: a loss for each network
        results = [t.detach()] if loss and not span.is_mask else ()
        unknown = (results or (read.made == "nan" and single)) and not self.recorder.is_complete
        if unknown or (made and (loss or (read.made == "nan" and single))):
            targets = [made.number] if made else []
            self.later(f"the script read {read}", targets, results, seen=Seen.READ)

    def about_reads(self):
        """Sentences about bad numbers that the script read, though the run ended well."""
        for read, n in self.reads.items():
            report = self.infinite.get(read)
            made = f": {report.op} at {report.line} made it" if report and report.op else ""
            made += f" (samples {few(report.samples)})" if made and report.samples else ""
            yield f"the script read {read}{f', {n} times' if n > 1 else ''}{made}"

    def forget_reads(self):
        """Forget what the script read in a step that the loss scaler skips."""
        self.reads = Counter()
        if self.step == self.recorder.steps and self.seen is Seen.READ:
            self.reports, self.symptom, self.seen = {}, "", Seen.COMPUTED
            self.about.clear()

    def sentences(self):
        """Sentences about bad numbers that had no effect."""
        yield from self._large()
        for source, (rows, written) in self.unasked.items():
            yield (
                f"{source} holds NaN or inf {rows} ({written}), and nothing has asked for them: "
                "a batch that does makes the loss NaN"
            )

    def finite(self, what, t):
        """A finite number that is too large to be squared. (A norm may be large without one.)"""
        if (span := extent(t)).is_large:
            self.large.setdefault(what, (self.recorder.steps, span.bad_end))

    def _large(self):
        """The same in a sentence."""
        told = [f"{what} was {made} at step {step}" for what, (step, made) in self.large.items()]
        if told:
            yield f"{few(told, 2, '; ')}: {LARGE}"

    # What made it, and what is said

    def explain(self, targets=(), results=(), raised="no error"):
        """Find the cause now: repeat the step, or use what was watched."""
        locator = self.hooks.locator
        report = None
        try:
            if not self.hooks.depth:  # an optimizer within the backward would step again
                report = replay(self.recorder, targets)
        except Exception as error:
            self.hooks.say(f"the step could not be made again ({first_line_of(error)})", every=True)
        origin = locator and locator.origin_of(results)
        kind = report.source.kind if report and report.source else None
        earlier = kind in STATE and not (origin and origin.source)
        if report and kind is not Kind.UNSEEN and not (origin and earlier):
            unknown = (Verdict.NOT_REPRODUCIBLE, Verdict.CALIBRATION, Verdict.ERROR)
            if report.verdict not in unknown or report.tried or report.symptom == raised:
                return report
        return verdict_on_origin(origin) if origin else None

    def later(self, symptom, targets, results=(), seen=Seen.COMPUTED, about=None):
        """Explain it now and report it at the end. In a step that was not recorded a second run
        must see it, too, but for a loss. `about`: the Source that is bad. Return whether there will
        be a report."""
        self.deferred.transfer()  # weights that were bad before are the cause
        if not self.reports and self.reads.total() < 4:
            report = self.explain(targets, results)
            doubtful = not (results or self.recorder.is_complete)
            if not ((report and report.op) or results or doubtful):
                return False
            if report or self.recorder.is_complete or not self.symptom:
                self.found(symptom, report, seen=seen, about=about)
                self.doubtful = doubtful and not report
        return True

    def stop(self, symptom, report, step=None):
        """Report and end the script, because the number would reach the weights."""
        self.found(symptom, report, step)
        if self.hooks.world > 1:
            self._agree(report)
        buffers_back(self.recorder.calls)
        self.hooks.close()
        raise SystemExit(3)

    def found(self, symptom, report, step=None, seen=Seen.COMPUTED, about=None):
        """Keep it for the end of the script."""
        self.step = self.recorder.steps if step is None else step
        self.symptom, self.seen = f"{symptom} at step {self.step}", seen
        self.recorded, self.doubtful = self.recorder.is_complete, False
        if report and report.source not in self.about:  # else a report says what made it so
            self.rank_of_origin = self.hooks.rank
            self._keep(symptom, report)
            if about:
                self.about.add(about)

    def _keep(self, symptom, report):
        """Keep the report, with what the watch knows about this step and earlier ones."""
        names = list(report.names)
        if report.op and report.step < self.step:
            names.append(f"it was made at step {report.step}")
        if report.verdict is Verdict.DATA:
            names += self.hooks.warnings_before()
            if self.hooks.warned:
                at, text = next(iter(self.hooks.warned.items()))
                then = "at these samples" if report.samples else "where this number is made"
                first = f"look first at {at}, where NumPy warned ({text}), then {then}"
                report = replace(report, fix=advice_on(report)._replace(text=first))
        source = report.source
        if source and source.kind is Kind.PARAMETER and (line := self._birthplace(source.name)):
            first = f"look at {line}, which made it: no step has moved it yet"
            report = replace(report, fix=Advice(first))
        if report.verdict is Verdict.WEIGHTS and (grown := self.history.by_hand()):
            lower = Advice(f"a lower learning rate, or clip_grad_norm_: {grown}", Topic.RATE)
            report = replace(report, verdict=Verdict.DIVERGENCE, fix=lower)
        if report.verdict in (Verdict.DIVERGENCE, Verdict.OPTIMIZER):
            names += self._large()
        if report.verdict is Verdict.DIVERGENCE:
            names += self.history.growth()
            negative = self.history.negative()
            if negative and not report.fix and advice_on(report).topic is Topic.GROWTH:
                climbs = Advice(f"{negative}, and each step climbs: {RISES}", Topic.RATE)
                report = replace(report, fix=climbs)
            ran_away = self.history.ran_away()
            if ran_away and not report.fix:
                report = replace(report, fix=Advice(f"{ran_away} (an average has factors of 0..1)"))
            grown = next(self.history.grown(self.deferred), "") or next(self.history.leaps(), "")
            if grown and not (report.source or report.fix):
                first = f"a lower learning rate: {grown}; else {report.suggestion}"
                report = replace(report, fix=Advice(first, Topic.RATE))
        if report.source in self.unasked:
            names.append(self.unasked[report.source][1])
        report = self.scaling.overrule(report, raised=self.seen is Seen.RAISED)
        grows = report.verdict in (Verdict.CALIBRATION, Verdict.DIVERGENCE)
        if causes := self.silent.causes() if grows else ():
            report = replace(report, fix=Advice(causes[0]))
        elif words := in_its_words(self.history.framework, report):
            report = replace(report, fix=Advice(report.suggestion + words))
        key = report.op or symptom, report.line
        if key not in self.reports or self.reports[key].step == self.step:  # a step's last
            about = {"symptom": symptom, "step": self.step, "rank": self.hooks.rank}
            grew = report.verdict is Verdict.DIVERGENCE and self.history.grew()
            self.reports[key] = replace(report, names=tuple(names), grew=grew, **about)

    def _birthplace(self, name):
        """The line that computed the numbers with which this parameter began, if no step was made
        since; or ""."""
        if self.recorder.steps:
            return ""
        names = self.history.names
        for p in (p for root in list(names.roots) for p in root.parameters()):
            made = self.recorder.memory.get(storage_of(p))
            if made and names.of(p) == name:
                return line_of(made.frames)
        return ""

    def _agree(self, report):
        """Let one rank alone report: that of the origin. This is no collective: wait WAIT seconds
        for a rank that left."""
        rank, world = self.hooks.rank, self.hooks.world
        source = report and report.source
        constant = source and source.kind is Kind.CONSTANT
        received = not report or not report.op or "c10d" in report.op or bool(constant)
        store = dist.distributed_c10d._get_default_store()
        keys = [f"autopsy/{rank}" for rank in range(world)]
        store.set(keys[rank], json.dumps([received, rank, self.text]))
        with suppress(Exception):
            store.wait(keys, timedelta(seconds=WAIT))
        every = [json.loads(store.get(key)) for key in keys if store.check([key])]
        _, self.rank_of_origin, text = min(every)
        self.reports = {"": with_rank(text, self.rank_of_origin, world)} if text else {}
        if text and rank != self.rank_of_origin and os.environ.get("LOCAL_RANK") == "0":
            # that rank may be on another machine
            where = f"the report is that of rank {self.rank_of_origin}, on its machine"
            there = f"{self.symptom}; {where}"
            self.hooks.say(there, every=True)
