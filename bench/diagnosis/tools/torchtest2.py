"""torchtest2's check_model, with the search for the operation behind a NaN switched on: autograd's
anomaly mode, in a step of its own. Loss and network are handed to it as one module.

Source: https://pypi.org/project/torchtest2/ ("Configuration reference", detect_anomaly)
"""

import re
import warnings

import torch
from torch import nn

from bench.diagnosis.judge import Answer, own_line

NAME = "torchtest2"
RUN = "`check_model` on each micro-batch, with `detect_anomaly`"
SAYS = ("op", "line")
NEEDS = "torchtest2"
PIP = "torchtest2"


class Whole(nn.Module):
    """The network and its loss."""

    def __init__(self, step):
        super().__init__()
        self.net, self.step = step.net, step

    def forward(self, *batch):
        half = self.step.half
        with torch.autocast("cpu", half, enabled=half is not None and not self.step.pure):
            return self.step.loss(self.net, *batch).float() * self.step.scale


def diagnose(build):
    import torchtest2

    step = build()
    for batch in step.batches:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = torchtest2.check_model(
                Whole(step),
                batch,
                loss_fn=lambda loss: loss,
                batch_dim=None,
                overfit_steps=1,
                detect_anomaly=True,
            )
        function = re.search(r"Function '(\w+)' returned nan", report["overfit_batch"].message)
        if function:
            trace = "\n".join(str(warning.message) for warning in caught)
            return Answer(op=function[1], line=own_line(trace), more=str(report))
    return Answer(more=str(report))
