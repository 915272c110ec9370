"""
Autocast rules: what would autocast compute in half?

It follows a run in fp32 (or in half) and says of each operation whether autocast would compute it
in half, by the rules for CUDA: products and convolutions in half; softmax, norms, losses, exp, log,
powers and sums in fp32; all others in the type of their inputs. A backward runs in the type of its
forward.
"""

import linecache
import re
import sys
from contextlib import ExitStack
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..frames import TORCH, script_frame
from ..module_stack import around_modules
from ..tensors import HALF, flat_tensors, storage_of

# Names of aten's operations: those that autocast casts to half, and to fp32
HALF_OPS = re.compile(
    "((add|badd)?b?mm|(add)?mv|addbmm|addr|convolution|linear|prelu(_kernel)?"
    "|.*(attention|lstm|gru|rnn_tanh|rnn_relu|rnn_layer).*)(_backward)?"
)
FLOAT_OPS = re.compile(
    "(pow|acos|asin|cosh|sinh|tan|exp|expm1|log|log10|log1p|log2|reciprocal|rsqrt|erfinv|sum|prod"
    "|cumsum|cumprod|softplus|renorm|logsumexp|linalg_vector_norm|norm|dist|fft_.*"
    "|.*(softmax|_loss|cdist|pdist|layer_norm|group_norm|fused_rms_norm|cross_entropy|nll|kl_div"
    "|upsample).*)(_forward|_backward|_backward_data)?"
)
# Functions of several operations, which autocast casts as a whole
FLOAT_FUNCTIONS = re.compile(
    "cosine_similarity|normalize|pairwise_distance|layer_norm|group_norm|rms_norm|kl_div"
    "|.*_loss|.*cross_entropy.*|dist|cdist|pdist|logsumexp|softplus|norm|renorm"
)
# and those that it casts to half, whatever they are made of
HALF_FUNCTIONS = ("einsum", "multi_dot", "linalg_multi_dot", "chain_matmul", "vecdot",
                  "linalg_vecdot")  # fmt: skip
FP32 = r"\b(float|float32)\b"


class AutocastRules(TorchFunctionMode):
    """runs_in_half(operation ...) for each operation, in their order, while it is entered."""

    def __init__(self):
        super().__init__()
        self.backward = False  # is the operation under way part of a backward?
        self._narrow = WeakKeyDictionary()  # storages: would they be in half?
        self._nodes = {}  # sequence number of a node of autograd: is its forward in half?
        self._regions = []  # of autocast: does it cast? None: torch's own affair
        self._learns = [False]  # of the modules under way: do they hold weights?
        self._chooses = False  # the script says where it casts
        self._functions = []  # under way

    def __enter__(self):
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

        def entered(cast):
            self._regions.append(self._casts(cast))
            return enter(cast)

        def left(cast, *error):
            self._regions.pop()
            return leave(cast, *error)

        self._undo = ExitStack()
        patch = mock.patch.multiple(torch.autocast, __enter__=entered, __exit__=left)
        self._undo.enter_context(patch)
        self._undo.enter_context(around_modules(self._begins, self._ends))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._undo.close()

    def _begins(self, module, args):
        weights = next(iter(module.parameters()), None) is not None
        self._learns.append(weights or self._learns[-1])

    def _ends(self, module, args, out):
        self._learns.pop()

    def _casts(self, cast):
        """Whether a region that begins would cast: enabled=False is an island in fp32, but
        enabled=args.amp, though off now, is where the script would cast."""
        file = sys._getframe(2).f_code.co_filename
        if file.startswith(TORCH) and not file.endswith("autocast_mode.py"):
            return None  # a checkpoint, which repeats its forward
        if not cast._enabled and (file.startswith(TORCH) or "False" in source_now()):
            return False
        self._chooses = True
        return True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        self._functions.append(name)
        try:
            out = func(*args, **kwargs)
        finally:
            self._functions.pop()
        asked = name == "float" or (name in ("to", "type") and re.search(FP32, source_now()))
        if asked and out is args[0] and self.is_half(out) and not out.is_leaf:
            out = out.clone()  # in half it were another tensor
            self._narrow[storage_of(out)] = False
        made_like = name in ("to", "type", "type_as") or not flat_tensors((args, kwargs))
        if made_like and isinstance(out, Tensor) and out.dtype is torch.float32:
            like = args[1] if name == "type_as" else named_by_type()
            if isinstance(like, Tensor) and self.is_half(like) and not self.is_half(out):
                out = out.clone() if any(out is a for a in args) else out
                self._narrow[storage_of(out)] = True
        return out

    def is_half(self, t):
        return t.dtype in HALF or self._narrow.get(storage_of(t), False)

    def is_product(self, name):
        return HALF_OPS.fullmatch(name) or any(name in HALF_FUNCTIONS for name in self._functions)

    def stays_in_fp32(self, name):
        return FLOAT_OPS.fullmatch(name) or any(map(FLOAT_FUNCTIONS.fullmatch, self._functions))

    def runs_in_half(self, name, given, made):
        """Whether autocast would compute this operation in half. `given`, `made`: its tensors of
        floating point."""
        node = torch._C._current_autograd_node()
        self.backward = node is not None and not torch.is_grad_enabled()  # else a checkpoint's
        if self.backward:
            half = self._backward(node, given)
        else:
            half = self._forward(name, given)
            self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, half)
        if any(t.dtype is torch.float64 for t in made):
            half = False
        if any(t.dtype in HALF for t in (*given, *made)):
            half = any(t.dtype in HALF for t in made)  # it is what it is
        before = {storage_of(t) for t in given}
        for t in made:
            if storage_of(t) not in before:
                self._narrow[storage_of(t)] = half
        return half and bool(made)

    def _forward(self, name, given):
        regions = [casts for casts in self._regions if casts is not None]
        casts = regions[-1] if regions else not self._chooses
        learns = self._learns[-1] or any(t.requires_grad or self.is_half(t) for t in given)
        casts = casts and learns  # a data set computes outside of autocast
        real = any(torch.is_autocast_enabled(t.device.type) for t in given[:1])
        if real or not given:
            return False  # the types are what they are
        if casts and self.stays_in_fp32(name):
            return False
        if casts and self.is_product(name):
            return True
        if name.startswith(("native_batch_norm", "cudnn_batch_norm")):
            return self.is_half(given[0])  # its weights stay in fp32
        large = [t for t in given if t.dim()] or given  # a number has no say in the type
        return all(map(self.is_half, large))

    def _backward(self, node, given):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return all(map(self.is_half, given))
        return self._nodes.get(node._sequence_nr(), False)

    def forget(self):
        """Forget a step that is over."""
        self._nodes.clear()


def named_by_type():
    """What the script's current line takes a type from: x in `dtype=x.dtype`, `y.to(x.dtype)`."""
    found = re.search(r"\b(\w+)\.dtype\b", source_now())
    return found and script_frame().f_locals.get(found[1])


def source_now():
    """The script's current line."""
    frame = script_frame()
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)
