"""
Contracts: is a function of torch given what its page asks for?

Some functions take numbers that they cannot mean, and nothing fails: kl_div takes log-probabilities
and is given probabilities, cosine_embedding_loss takes 1 and -1 and is given 1 and 0, a float mask
of 0 and 1 is added to the scores of an attention. For each such function there is one that looks at
its arguments: True if they cannot be meant, False if they are right, None if they show nothing.
Told is a line where it was always True.
"""

import inspect
from collections import Counter

from torch import Tensor

from ...frames import line_now
from ...tensors import extent
from ...watch.events import FirstFunctions
from ..shared.classification import layer_of

OFTEN = 3  # calls at one line
MOST = 64  # of them that are looked at
MANY = 0.1  # share of numbers, or distance of a sum from 1
ATTENTION = ("query", "key", "value", "attn_mask")  # a function in C tells no names


def _are_probabilities(input, target, log_target=False, **_):
    """A log-density may be above 0."""
    t = input.detach()
    sums = [(t.sum(d) - 1).abs().amax() < MANY for d in range(t.dim())]
    return bool(t.amin() >= 0) and any(map(bool, sums)) and not log_target


def _sums_to_no_1(log_probs, **_):
    """A prior of the labels may be subtracted from what a softmax has made."""
    sums = log_probs.detach().float().exp().sum(-1)
    far = bool(((sums - 1).abs() > MANY).float().mean() > 1 - MANY)
    return far if layer_of(log_probs.grad_fn) is not None else None


def _is_one_class(input, target, **_):
    return input.shape[min(1, input.dim() - 1)] == 1 and not target.is_floating_point()


def _is_far_from_0_to_1(target, weight=None, reduction="mean", **_):
    """A GAN may have labels of 1.2, and a weight or the script may leave some out."""
    span = extent(target)
    far = span.low < -0.5 or span.high > 1.5
    return far if weight is None and reduction == "mean" else None


def _is_0_and_1(target, reduction="mean", **_):
    values = {*target.detach().unique().tolist()}
    return None if values == {1} or reduction != "mean" else values == {0, 1}


def _is_0_and_1_in_ranking(target, margin=0.0, reduction="mean", **_):
    # without a margin 0 may leave a pair out
    return _is_0_and_1(target, reduction) if margin else None


def _is_float_mask(attn_mask=None, key_padding_mask=None, **_):
    """0 and 1 in runs of several lengths, as of padding, or of what comes later. (Edges of a graph
    may be added, or something for the first places.)"""
    masks = [t for t in (attn_mask, key_padding_mask) if isinstance(t, Tensor)]
    masks = [t for t in masks if t.is_floating_point() and not t.requires_grad]
    masks = [t for t in masks if t.unique().tolist() == [0, 1] and len(t.sum(-1).unique()) > 1]
    moves = [t.diff(dim=-1) for t in masks]
    return any(bool((x <= 0).all() or (x >= 0).all()) for x in moves) if masks else None


SIDES = "takes 1 and -1, and its target holds 0 and 1: where that is 0 a pair counts for nothing"
ADDED = "adds a float mask to the scores, so 0 and 1 hide nothing: give it as bool, or 0 and -inf"
CONTRACTS = {  # function: (what looks at its arguments, what to say)
    "kl_div": (
        _are_probabilities,
        "takes log-probabilities as its input, and is given probabilities: take log_softmax",
    ),
    "ctc_loss": (
        _sums_to_no_1,
        "takes log-probabilities, and these sum to 1 nowhere: take log_softmax over the classes",
    ),
    "cross_entropy": (
        _is_one_class,
        "over one class is 0 whatever the network says: for two classes it takes two, or "
        "binary_cross_entropy_with_logits",
    ),
    "binary_cross_entropy_with_logits": (
        _is_far_from_0_to_1,
        "takes targets in 0..1, and is given others (a mask of 0 and 255?)",
    ),
    "cosine_embedding_loss": (_is_0_and_1, SIDES),
    "hinge_embedding_loss": (_is_0_and_1, SIDES),
    "soft_margin_loss": (_is_0_and_1, SIDES),
    "margin_ranking_loss": (_is_0_and_1_in_ranking, SIDES),
    "scaled_dot_product_attention": (_is_float_mask, ADDED),
    "multi_head_attention_forward": (_is_float_mask, ADDED),
}


class Contracts(FirstFunctions):
    """Arguments that cannot be meant."""

    functions = (*CONTRACTS, "logsumexp")

    def __init__(self, watch):
        super().__init__(watch)
        self.looks, self.wrong = Counter(), Counter()  # (line, name): calls
        self.sums = False  # does the script make a sum by hand, of which it takes the logarithm?

    def function_called(self, func, name, args, kwargs, out):
        if name == "logsumexp":
            self.sums = True
            return
        key, (is_wrong, _) = (line_now(), name), CONTRACTS[name]
        if self.looks[key] < MOST:
            answer = is_wrong(**_bound(func, args, kwargs))
            if answer is not None:
                self.looks[key] += 1
                self.wrong[key] += answer

    def sentences(self):
        for (line, name), n in self.looks.items():
            by_hand = self.sums and name == "ctc_loss"
            if n >= OFTEN and self.wrong[line, name] == n and not by_hand:
                _, text = CONTRACTS[name]
                yield f"{name} at {line} {text}"


def _bound(func, args, kwargs):
    """{name: argument}"""
    try:
        names = inspect.signature(func).parameters
    except (TypeError, ValueError):
        names = ATTENTION
    return dict(zip(names, args, strict=False)) | kwargs
