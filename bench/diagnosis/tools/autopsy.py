"""This repository's autopsy, called as a run calls it: make the record, run the step, which goes
bad (and may write into buffers), then examine it.

Source: docs/autopsy.md
"""

import autopsy
from bench.diagnosis.judge import ASKED, Answer, is_bad

NAME = "autopsy"
RUN = "`examine` after the bad step, as `train.py` and `python autopsy SCRIPT` do"
SAYS = ASKED


def report_of(build):
    """The whole report."""
    step = build()
    record = autopsy.StepRecord(7, step.net)
    for batch in step.batches:
        record.keep(*batch)
    is_bad(step)
    return autopsy.examine(
        step.run,
        record,
        step.net,
        state=step.state,
        num_classes=step.num_classes,
        precision=step.precision,
        scale=step.scale,
    )


def diagnose(build):
    report = report_of(build)
    parts = (
        "verdict",
        "module",
        "op",
        "node",
        "line",
        "samples",
        "micro_batch",
        "names",
        "suggestion",
    )
    return Answer(**{part: getattr(report, part) for part in parts}, more=str(report.tried))
