"""msprobe (MindStudio Probe): dump the statistics of the bad step, then `msprobe overflow_check` on
the dump. It reports the first call whose inputs are finite and whose output is not.

We call it before we build the network, as its quick start does. "mix" is the level that writes down
modules and calls of torch. For a bad backward its report shows no stack; we then take the stack of
the same call's forward from the dump, in its favour.

Source: https://gitcode.com/Ascend/msprobe/blob/master/docs/en/quick_start/pytorch_quick_start.md
and https://gitcode.com/Ascend/msprobe/blob/master/docs/en/overflow_check/overflow_check_instruct.md
"""

import contextlib
import json
import re
import tempfile
from pathlib import Path

from bench.diagnosis.judge import Answer, own_frame

NAME = "msprobe"
RUN = "PrecisionDebugger (statistics, level mix) around the step, then `msprobe overflow_check`"
SAYS = ("module", "op", "line")
NEEDS = "msprobe"
PIP = "mindstudio-probe"


def diagnose(build):
    from msprobe.overflow_check.analyzer import OverFlowCheck
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(
            json.dumps(
                {
                    "task": "statistics",
                    "dump_path": f"{folder}/dump",
                    "rank": [],
                    "step": [],
                    "level": "mix",
                    "statistics": {"scope": [], "list": [], "data_mode": ["all"]},
                }
            )
        )
        debugger = PrecisionDebugger(config_path=str(config))
        step = build()
        debugger.start(model=step.net)
        for batch in step.batches:
            with contextlib.suppress(Exception):
                step.run(batch)
        debugger.stop()
        debugger.step()
        OverFlowCheck(f"{folder}/dump/step0", f"{folder}/out").analyze()
        results = [*Path(folder).glob("out/*.json")]
        if not results:
            return Answer()
        (nodes,) = json.loads(results[0].read_text()).values()
        (stacks,) = Path(folder).glob("dump/step0/*/stack.json")
        return answer(nodes[0], json.loads(stacks.read_text()))


def answer(node, stacks):
    """`node`: of the report, such as "Functional.linear.1.forward", or a module's,
    "Module.ff.wo.Linear.forward.0". `stacks`: {id: [names, frames]}.
    """
    call = node["op_name"]
    modules = [name for name in node["construct_info"] if name.startswith("Module.")]
    module = modules[-1].split(".")[1:-3] if modules else []
    op = call.split(".")[-3 if call.startswith("Module.") else 1]
    frames = node["stack_info"]
    forward = call.replace(".backward", ".forward")
    for names, stack in stacks.values():
        if not frames and forward in names:
            frames = stack
    found = (re.match(r"File (.+), line (\d+), in ([^,]+),", frame) for frame in reversed(frames))
    return Answer(
        op=op,
        module=".".join(module),
        more=call,
        line=own_frame(match.groups() for match in found if match),
    )
