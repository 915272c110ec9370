"""
Wrong way: does a ReduceLROnPlateau wait for an accuracy to fall?

Its mode is "min" unless one says "max": given an accuracy, it lowers the rate while that rises.
Told is one whose step() stands on a line that gives it something called an accuracy, an F1 score,
an AUC and so on.
"""

import ast
import re

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...frames import line_of, script_frames_now
from ...watch.events import Events
from ..shared.syntax import covers, tree_of

RISES = re.compile(
    r"(?i)(^|[._'\"])(m?acc\d?|accuracy|top1|f1|auc|auroc|m?iou|psnr|ssim)($|[_'\"])"
)
FALLS = re.compile(r"(?i)loss|err")
OFTEN = 3  # steps of it


class WrongWay(Events):
    """Metrics that such schedulers are given, by name."""

    def __init__(self, watch):
        self.found = {}  # (line, what it is given): steps

    def scheduled(self, scheduler):
        if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "min":
            frames = script_frames_now()
            name = _given(*frames[0][:2]) if frames else ""
            if RISES.search(name) and not FALLS.search(name):
                key = line_of(frames), name
                self.found[key] = self.found.get(key, 0) + 1

    def sentences(self):
        for (line, given), n in self.found.items():
            if n >= OFTEN:
                yield (
                    f"ReduceLROnPlateau waits for `{given}` to fall, at {line}, and lowers the "
                    'rate while it rises: ReduceLROnPlateau(..., mode="max")'
                )


def _given(file, number):
    """What a step() on this line is given, if it is a name, an attribute or an entry; or ""."""
    for node in ast.walk(tree_of(file)):
        is_step = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "step"
        if is_step and node.args and covers(node, number):
            given = node.args[0]
            if isinstance(given, ast.Name | ast.Attribute | ast.Subscript):
                return ast.unparse(given)
    return ""
