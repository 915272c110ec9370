"""
Overflow: what would leave half precision, before the switch to autocast?

It reads a few steps of a script as they are, and asks of each operation that autocast would compute
in half: how far are its numbers from the end of fp16 (65504)? Does half lose a small difference,
make a divisor 0, or make neighbouring positions equal? Does a gradient become 0? Then it ends the
script.
"""

import re
from math import floor, inf, log2
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from ..advice import VERDICTS, Verdict
from ..frames import first_line_of
from ..locator import Locator
from ..operations import rule_of
from ..tensors import HALF, LIMIT, exchange_dtype, extent, floats_in, numbers_of, storage_of
from .autocast_rules import AutocastRules

STEPS = 3
MOST = 65504.0  # (2 - 2**-10) * 2**15, the largest number of fp16
OVER = 65520.0  # from here on fp16 rounds to inf
NEAR = 8  # less than three bits below the end
LOST = 0.5  # of the norm of a gradient
GONE = 0.9  # of the norm of a difference
FAINT = 1e-5  # of the largest gradient: below it is rounding, like that of a bias before BatchNorm
ROOM = 8  # findings that are told one by one
# Operations that break at 0, and by which argument
BREAK_AT_0 = {"div": 1, "reciprocal": 0, "rsqrt": 0, "sqrt": 0}
BREAK_AT_0 |= dict.fromkeys(("log", "log2", "log10"), 0)
NO_HALF = re.compile(
    "linalg_(solve|inv|cholesky|det|slogdet|svd|eig|qr|lu|lstsq|ldl|householder).*"
    "|cholesky_(solve|inverse)|triangular_solve|ormqr|geqrf"
)
ONE_TYPE = ("index_add", "index_copy", "scatter", "scatter_reduce", "masked_scatter", "lerp")
CAST = ("index_put", "scatter_add")
DIFFERENCES = ("sub", "rsub", "add")
KEEP_AWAY = (*DIFFERENCES, "clamp", "clamp_min", "clamp_max")
SCALER = "a loss scale (torch.amp.GradScaler)"
EARLIER = (
    "what half has rounded stays rounded: begin fp32 where these numbers are made, or write it "
    "otherwise (logsigmoid, log_softmax, expm1, torch.var, a larger eps)"
)
PASSES_ON = ("where", "view", "clone", "copy", "to_copy", "cat", "stack", "index", "t", "transpose")


class Overflow(Locator):
    """Reads a few steps of a script and then ends it. `code` and `text` are its answer."""

    def __init__(self, steps=STEPS):
        super().__init__()
        self.autocast_rules = AutocastRules()
        self.underflowed = (
            WeakKeyDictionary()
        )  # storages with numbers that half makes 0: what says so
        self.to_one = WeakKeyDictionary()  # storages with a bound that half makes 1
        self.over = WeakKeyDictionary()  # storages with numbers beyond the end
        self.found = {}  # (line, phase, kind): (how bad, words)
        self.flow = []  # of gradients: (root of the mean square, share that is lost, words)
        self.last, self.steps, self.results = steps, 0, 0
        self.failure = ""  # of ours
        self.func = None  # the operation under way

    def contexts(self):
        yield from super().contexts()
        yield register_optimizer_step_pre_hook(self.begins)
        yield register_optimizer_step_post_hook(self.ends)
        yield torch.compiler.set_stance("force_eager")
        yield self.autocast_rules

    def begins(self, optimizer, args, kwargs):
        self.paused = len(args) == 1 and not kwargs.get("closure")  # weights stay in fp32

    def ends(self, optimizer, args, kwargs):
        self.paused = False
        self.steps += 1
        self.autocast_rules.forget()
        most = max((size for size, *_ in self.flow), default=0.0)
        lost = [flow for flow in self.flow if flow[0] > FAINT * most and flow[1] > LOST]
        if lost:
            first, worst = lost[0], max(share for _, share, _ in lost)
            also = f"; {len(lost) - 1} more lose over half of their norm" if lost[1:] else ""
            self.found["", "backward", "gradient"] = 1 + worst / 2, f"{first[2]}{also}: {SCALER}"
        self.flow = []
        if self.steps >= self.last:
            raise SystemExit

    def operation(self, func, args, kwargs):
        """Make it, and check it."""
        out = func(*args, **kwargs)
        if self.paused or self.failure or func.namespace != "aten":
            return out
        try:
            self.check_operation(func, args, kwargs, out)
        except Exception as error:  # ours, not the script's
            self.failure = f"{func} could not be read ({first_line_of(error)}): nothing is known"
        return out

    def check_operation(self, func, args, kwargs, out):
        """Check one operation of the script."""
        self.func = func
        given = floats_in((args, kwargs))
        made = [t for t in floats_in(out) if t.numel()]
        rule = rule_of(func)
        name = rule.name
        half = self.autocast_rules.runs_in_half(name, given, made)
        backward = self.autocast_rules.backward
        with _disable_current_modes(), torch.no_grad():
            if not backward:
                self.raises(name, given, half, rule.writes)
            if not backward and not rule.writes:  # its inputs are overwritten
                self.zeros(name, args)
                self.angles(name, args)
                if half:
                    self.constants(name, args, kwargs, made[0])
                if name in DIFFERENCES and made:
                    self.difference(args, made[0])
            if half and name not in PASSES_ON and not rule.empty:
                self.results += 1
                self.result(name, args, kwargs, given, made)

    def raises(self, name, given, half, writes):
        """Operations that have no kernel for half, or none for two types. Where torch casts one of
        two types, it does not do so in place."""
        if half and NO_HALF.fullmatch(name):
            self.note("raises", 1e4, "it has no kernel for half, and raises")
        one_type = name in ONE_TYPE or (writes and name in CAST)
        if one_type and len({self.autocast_rules.is_half(t) for t in given}) > 1:
            self.note("raises", 1e4, "it is given half and fp32 together, and raises")

    def result(self, name, args, kwargs, given, made):
        """Check an operation that would run in half."""
        product = self.autocast_rules.is_product(name)
        if product:
            wide = [t for t in given if not self.autocast_rules.is_half(t)]
            self.sizes("of what it is given", wide)
            if not self.autocast_rules.backward:
                self.positions(wide)
        if any(t.dtype is torch.float16 for t in made):
            made = self.in_fp32(args, kwargs, made)
        self.sizes("of the result", made, given)
        if product and self.autocast_rules.backward:
            for t in made[:2]:  # the third is a bias
                self.flows(t)

    def note(self, kind, badness, words):
        origin = self.describe(self.func, ())
        place = origin.line, origin.phase, kind
        if badness > self.found.get(place, (0,))[0]:
            self.found[place] = badness, f"{_place(origin)}: {words}"

    def sizes(self, which, tensors, given=()):
        """Note tensors near or beyond the end of fp16, but not what merely follows from an earlier
        one."""
        passed_on = any(storage_of(t) in self.over for t in given)
        for t in tensors:
            numbers = numbers_of(t).float()
            real = (numbers >= -LIMIT) & numbers.isfinite()  # -inf and finfo.min are masks
            size = float(torch.where(real, numbers, 0.0).abs().amax()) if t.numel() else 0.0
            if size * NEAR <= MOST:
                continue
            over = f"{size / MOST:.3g} times the end of fp16 ({MOST:.0f})"
            if size < OVER:
                over = f"{size / MOST:.0%} of the end of fp16 ({MOST:.0f})"
            else:
                self.over[storage_of(t)] = True
            if not passed_on:
                self.note("size", size / OVER, f"{size:.3g} {which}, {over}")

    def in_fp32(self, args, kwargs, made):
        """Compute in fp32 what is already inf in fp16."""
        func = self.func
        seeded = torch.Tag.nondeterministic_seeded in func.tags or rule_of(func).writes
        if seeded or not any(t.isinf().any() for t in made):
            return made
        try:
            args, kwargs = exchange_dtype((args, kwargs), torch.float32, HALF)
            return floats_in(func(*args, **kwargs))
        except Exception:  # a kernel that knows half only
            return made

    def positions(self, tensors):
        """0, 1, 2 ... as real numbers: from 256 on two neighbours are one number in bf16."""
        for t in tensors:
            numbers = numbers_of(t).float()
            steps = [numbers.diff(dim=d) for d in range(numbers.dim()) if numbers.shape[d] > 256]
            if any((step == 1).all() for step in steps):
                size = float(numbers.amax())
                equal = float((numbers.bfloat16() != numbers).float().mean())
                words = f"bf16 rounds {equal:.0%} of them (exact up to 256; fp16 up to 2048)"
                if equal:
                    self.note("whole", 1 + equal, f"whole numbers up to {size:.0f}, {words}")

    def angles(self, name, args):
        """A sine of numbers that half rounds by a radian."""
        is_half = self.autocast_rules.is_half
        if name not in ("sin", "cos") or not is_half(args[0]) or not args[0].numel():
            return
        size = extent(args[0]).largest
        steps = [torch.finfo(dtype).eps * 2.0 ** floor(log2(max(size, 1.0))) for dtype in HALF]
        if max(steps) >= 1:
            words = f"fp16 rounds angles up to {size:.3g} to multiples of {steps[0]:g}"
            self.note("angle", 1 + max(steps), f"{words}, bf16 of {steps[1]:g}")

    def zeros(self, name, args):
        """Numbers that half makes 0 matter where they are divided by, or go into a log."""
        at = BREAK_AT_0.get(name, inf)
        t = args[at] if at < len(args) else None
        if not isinstance(t, torch.Tensor) or not self.autocast_rules.is_half(t):
            return
        numbers = numbers_of(t.detach()).float()
        gone = (numbers != 0) & (numbers.half() == 0)
        why = self.underflowed.get(storage_of(t), "")
        if gone.any():
            least = float(numbers[gone].abs().amin())
            many = f"{int(gone.sum())} of {gone.numel()} numbers"
            why = f"{many} like {least:.2g} become 0 in fp16 (below 3e-08)"
        if why and (name != "sqrt" or t.requires_grad):
            slope = "its slope" if name == "sqrt" else "the result"
            self.note("zero", 1e3, f"{why}: {slope} is then inf or NaN")

    def constants(self, name, args, kwargs, out):
        """x + 1e-8, x.clamp(1e-8, 1 - 1e-8): a number that is to keep x away from 0, or from 1."""
        bounds = [*args[1:], *kwargs.values()] if name in KEEP_AWAY else []
        for c in bounds:
            if type(c) is float and c and (rounded := float(torch.tensor(c).half())) in (0, 1, -1):
                if rounded == 0:
                    self.underflowed[storage_of(out)] = (
                        f"{c:g}, which is to keep it from 0, is 0 in fp16"
                    )
                elif rounded != c:
                    self.to_one[storage_of(out)] = f"{c!r}, its bound, is {rounded:g} in fp16"
        if name in DIFFERENCES and any(type(a) in (int, float) and abs(a) == 1 for a in args):
            near = [self.to_one.get(storage_of(t)) for t in args if isinstance(t, torch.Tensor)]
            if why := next(filter(None, near), ""):
                self.underflowed[storage_of(out)] = why

    def difference(self, args, out):
        """x + 1 - 1, 1 - p, E[x^2] - E[x]^2: of numbers that are rounded to half, little is left of
        a difference that is much smaller."""
        is_half = self.autocast_rules.is_half
        if not any(t.dtype is torch.float32 and is_half(t) for t in floats_in(args)):
            return
        exact = numbers_of(out.detach()).double()
        norm, kinds = float(exact.norm()), []
        for dtype in HALF:
            rounded = [
                a.to(dtype).to(a.dtype) if torch.is_tensor(a) and is_half(a) else a for a in args
            ]
            inexact = numbers_of(self.func(*rounded)).double()
            kind = str(dtype).removeprefix("torch.")
            gone = (exact != 0) & (inexact == 0)
            if gone.any():
                many = f"{int(gone.sum())} of {gone.numel()} numbers"
                self.underflowed[storage_of(out)] = f"{many} become 0 in {kind}, and not in fp32"
            off = float((inexact - exact).norm())
            if norm and GONE * norm < off < inf:
                kinds.append(f"{off / norm:.0%} of its norm in {kind}")
        if kinds:
            words = f"a difference of large numbers, off by {' and '.join(kinds)}"
            self.note("difference", 2.0, words)

    def flows(self, t):
        """Measure how much of a gradient is left in fp16 at this loss scale."""
        numbers = numbers_of(t).double()
        norm, size = float(numbers.norm()), extent(t).largest
        if norm and size <= MOST:
            rounded = numbers.half().double()
            off = float((numbers - rounded).norm())
            zeros = float(((numbers != 0) & (rounded == 0)).double().mean())
            words = f"{zeros:.0%} of its numbers become 0 in fp16 at this loss scale"
            at = _place(self.describe(self.func, ()))
            told = f"{at}: {words} (the largest is {size:.2g})"
            self.flow.append((norm / numbers.numel() ** 0.5, off / norm, told))

    @property
    def code(self):
        if self.failure or not self.steps:
            return 4
        return 3 if any(badness >= 1 for badness, _ in self.found.values()) else 0

    @property
    def text(self):
        """At most 12 lines, the worst first."""
        if self.failure:
            return self.failure
        if not self.steps:
            return "no step of an optimizer was seen: nothing is known"
        about = f"{self.results} results of {self.steps} steps that autocast would compute in half"
        lines = [f"  {words}" for _, words in sorted(self.found.values(), reverse=True)]
        if not lines:
            return f"{about}: none is within a factor of {NEAR} of {MOST:.0f}, and none is lost"
        if len(lines) > ROOM:
            lines[ROOM:] = [f"  and {len(lines) - ROOM} more"]
        if not self.code:
            return "\n".join([f"{about}: none leaves fp16, these come near its end:", *lines])
        head = f"would leave half precision, of {about}:"
        kinds = {key[2] for key, (badness, _) in self.found.items() if badness >= 1}
        if kinds - {"gradient"}:
            lines.append(f"  try: {VERDICTS[Verdict.PRECISION][1]}")
        if kinds & {"zero", "difference", "angle"}:
            lines.append(f"  {EARLIER}")
        return "\n".join([head, *lines])


def _place(origin):
    within = f" in {origin.module}" if origin.module else ""
    backward = f" (backward of {origin.node})" if origin.phase == "backward" else ""
    return f"{origin.line}: {origin.op}{within}{backward}"
