"""
Wrong side: does a mask hide the words of a sentence, and not its padding?

key_padding_mask of nn.MultiheadAttention is True where it hides, attn_mask of
scaled_dot_product_attention where it does not, and a tokenizer's is 1 where there is a word. The
other way round nothing fails, and each place sees padding only. While networks run in the first
steps it is noted which ids are padded, and what the scores of an attention
hide: told is a line that always hid each id but the padding.
"""

from collections import Counter

import torch

from ...frames import line_now
from ...watch.events import FirstFunctions
from ..shared.padding import padding_of

OFTEN = 3  # calls at one line
HIDDEN = -1e4  # scores that a mask has left


class WrongSide(FirstFunctions):
    """Padded ids, and the masks of the attentions that follow."""

    functions = ("embedding", "softmax", "scaled_dot_product_attention",
                 "multi_head_attention_forward")  # fmt: skip

    def __init__(self, watch):
        super().__init__(watch)
        self.padded = {}  # shape of ids: where they are padded; of this step
        self.looks, self.wrong = Counter(), Counter()  # line: calls

    def over(self):
        self.padded = {}

    def function_called(self, func, name, args, kwargs, out):
        if name == "embedding":
            ids = args[0] if args else kwargs["input"]
            index = args[2] if len(args) > 2 else kwargs.get("padding_idx")
            padding = padding_of(ids)
            if padding and padding.value in (0, index):
                self.padded[ids.shape] = padding.at
            return
        for hidden in _hidden(name, args, kwargs) if self.padded else ():
            at = self.padded.get(hidden.shape)
            if at is not None and hidden.any():
                self.looks[line_now()] += 1
                self.wrong[line_now()] += torch.equal(hidden, ~at)

    def sentences(self):
        for line, n in self.looks.items():
            if n >= OFTEN and self.wrong[line] == n:
                yield (
                    f"the attention at {line} hides each id but the padding: its mask is the wrong "
                    "way round (True hides in nn.MultiheadAttention, and shows in "
                    "scaled_dot_product_attention)"
                )


def _hidden(name, args, kwargs):
    """[samples, places]: what is hidden from each place of a sample."""
    if name == "multi_head_attention_forward":
        mask = kwargs.get("key_padding_mask")
        if mask is not None:
            yield mask if mask.dtype is torch.bool else mask < HIDDEN
        return
    mask = args[0] if name == "softmax" else kwargs.get("attn_mask", [*args, None, None, None][3])
    if mask is not None and mask.dim() in (3, 4):
        hidden = ~mask if mask.dtype is torch.bool else mask.detach() < HIDDEN
        yield hidden.flatten(1, -2).all(1)
