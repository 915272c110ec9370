"""torch's DebugMode (torch 2.10): the first operation in its list whose result is bad. DebugMode
records and does not judge: the hook that checks each result for NaN and inf is ours.

Source: https://docs.pytorch.org/tutorials/recipes/debug_mode_tutorial.html
"""

import contextlib

from torch.utils._pytree import tree_leaves

from bench.diagnosis.judge import Answer, beyond, own_line

NAME = "DebugMode"
RUN = "`DebugMode` with stack traces around the step, and a hook that checks each result"
SAYS = ("op", "line")
NEEDS = "torch.utils._debug_mode"


def diagnose(build):
    from torch.utils._debug_mode import DebugMode

    def look(func, types, args, kwargs, result):
        return {"bad": any(beyond(t) for t in tree_leaves(result))}

    step = build()
    with DebugMode(record_stack_trace=True) as mode, DebugMode.dispatch_hooks(record_hook=look):
        for batch in step.batches:
            with contextlib.suppress(Exception):
                step.run(batch)
    for call in mode.operators:
        if (getattr(call, "record", None) or {}).get("bad"):
            trace = getattr(call, "fwd_stack_trace", None) or call.stack_trace or ""
            return Answer(op=str(call.op), line=own_line(trace))
    return Answer()
