"""
Eval mode: which modules does eval() change, and which words say that something drops on purpose?

never_eval.py asks both; left_in_eval.py the first, and evaluation.py the second.
"""

import re

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

MEANT = re.compile(r"prenet|mc[ _-]?drop|monte|bayes|uncertain|always|stays on|at inference", re.I)


def differs(part):
    """Whether its mode makes a difference."""
    if isinstance(part, _DropoutNd):
        return part.p > 0
    if isinstance(part, nn.RNNBase):
        return part.dropout > 0
    return isinstance(part, _BatchNorm) and part.track_running_stats
