"""torch.autograd.set_detect_anomaly(True): the function that its error names, and the line of the
forward that its warning shows.

Source: https://docs.pytorch.org/docs/stable/autograd.html#anomaly-detection
"""

import re
import warnings

import torch

from bench.diagnosis.judge import Answer, own_line

NAME = "anomaly mode"
RUN = "autograd's anomaly mode around the step"
SAYS = ("op", "line")


def diagnose(build):
    step = build()
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        for batch in step.batches:
            try:
                step.run(batch)
            except Exception as error:
                function = re.search(r"Function '(\w+)' returned nan", str(error))
                trace = "\n".join(str(warning.message) for warning in caught)
                return Answer(op=function[1], line=own_line(trace)) if function else Answer()
    return Answer()
