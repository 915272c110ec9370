"""torch-audit: its check of the weights before the step, and of the gradients after it. It names
tensors that are bad, not the operation that made them so.

Source: https://pypi.org/project/torch-audit/ ("Quick Start")
"""

import contextlib

from bench.diagnosis.judge import Answer

NAME = "torch-audit"
RUN = "`audit` of the weights before the step, and of the gradients after it"
SAYS = ("names",)
NEEDS = "torch_audit"
PIP = "torch-audit"


def diagnose(build):
    from torch_audit import audit

    step = build()
    before = audit(step.net).findings
    for batch in step.batches:
        with contextlib.suppress(Exception):
            step.run(batch)
    after = audit(step.net, phase="backward").findings
    bad = [finding for finding in before if finding.rule_id == "TA100"]
    return Answer(
        names=tuple(f"{finding.module_path}.{finding.entity}" for finding in bad),
        more="\n".join(finding.message for finding in (*before, *after)),
    )
