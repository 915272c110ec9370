"""
Future mask: does a triangular mask show the future and hide the past?

A boolean mask is True where it hides for nn.MultiheadAttention, and where it shows for
scaled_dot_product_attention; triu() and tril() are easily exchanged, too. In the first steps the
masks and the masked scores of attentions are looked at. Told is a line that hides each time what
lies before each position, and nothing that lies after it. No word where another attention hides the
future (a network that reads both ways), or the source speaks of reading backwards.
"""

import re
from collections import Counter

import torch

from ...frames import code_of, line_now, script_frames_now
from ...watch.events import FirstFunctions

OFTEN = 2  # calls at one line
LEAST = 4  # positions
HIDDEN = -1e4  # scores that a mask has left
BACKWARDS = re.compile(
    r"backward[_ ]?(lm|mask|dec)|right[-_ ]to[-_ ]left|r2l|anti[-_ ]?causal", re.IGNORECASE
)


class FutureMask(FirstFunctions):
    """What the square masks of attentions hide."""

    functions = ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")

    def __init__(self, watch):
        super().__init__(watch)
        self.looks, self.wrong = Counter(), Counter()  # line: calls
        self.is_causal = False  # does some attention hide the future?

    def function_called(self, func, name, args, kwargs, out):
        mask = args[0] if name == "softmax" else kwargs.get("attn_mask", [*args, None, None][3])
        n, columns = mask.shape[-2:]
        if n != columns or n < LEAST or (name == "softmax" and mask.dim() < 3):
            return
        if mask.dtype is torch.bool:
            seen = mask if name == "scaled_dot_product_attention" else ~mask
        else:
            seen = mask.detach() > HIDDEN
        seen = seen.reshape(-1, n, n)
        future = torch.ones(n, n, dtype=torch.bool, device=seen.device).triu(1)
        sees_future, sees_past = (seen & future).any(), (seen & future.T).any()
        self.is_causal |= bool(sees_past and not sees_future)
        # in some sample all of the future, in the others less (padding)
        whole = (seen | ~future).flatten(1).all(1).any()
        line, code = line_now(), code_of(script_frames_now())
        self.looks[line] += 1
        self.wrong[line] += bool(whole and not sees_past and not BACKWARDS.search(code))

    def sentences(self):
        for line, n in self.looks.items() if not self.is_causal else ():
            if n >= OFTEN and self.wrong[line] == n:
                yield (
                    f"a mask of the attention at {line} hides the past from each position and "
                    "shows the future: is the other triangle meant (True hides in "
                    "nn.MultiheadAttention, and shows in scaled_dot_product_attention)?"
                )
