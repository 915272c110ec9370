"""
Which tool names what made the first bad number? Each tool of bench/diagnosis/tools on each case of
bench/diagnosis/cases, judged by bench/diagnosis/judge.py. README.md beside this file says how.

    python bench/diagnosis                     # minutes on two CPU cores
    python bench/diagnosis --fresh             # the ten cases that were held out until the end
    python bench/diagnosis --tool hooks --only '*norm*'  # prints, and writes no file
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(path for path in sys.path if Path(path) != HERE)]
from bench import record  # noqa: E402
from bench.diagnosis.cases import CASES, FRESH  # noqa: E402
from bench.diagnosis.judge import ASKED, trial  # noqa: E402


def tools_here(patterns=("*",)):
    """{name: adapter} of the files in tools/ whose tool is installed here."""
    tools = {}
    for path in sorted(HERE.glob("tools/*.py")):
        tool = importlib.import_module(f"bench.diagnosis.tools.{path.stem}")
        needs = getattr(tool, "NEEDS", "torch")
        if not any(fnmatch(path.stem, pattern) for pattern in patterns):
            continue
        if importlib.util.find_spec(needs) is None:
            print(f"{tool.NAME} is left out: {needs} is not installed here")
            continue
        tools[tool.NAME] = tool
    return tools


def version(tool):
    package = getattr(tool, "PIP", None)
    return importlib.metadata.version(package) if package else ""


def count(answers):
    """[right, asked]"""
    return [answers.count(True), len(answers) - answers.count(None)]


def totals(rows, says):
    """[right, asked] of one tool. What it does not say is not counted."""
    sums = {"wholly right": count([row["whole"] for row in rows])}
    for what in says:
        sums[what] = count([row["right"][what] for row in rows])
    sums["crashes"] = sum(bool(row["crash"]) for row in rows)
    sums["islands that mend"] = count([row["island mends"] for row in rows])
    sums["by kind"] = {
        kind: count([row["whole"] for row in rows if row["kind"] == kind])
        for kind in Counter(row["kind"] for row in rows)
    }
    return sums


def beaten(cases, own="autopsy"):
    """{"case: what": the tools that are right there where `own` is wrong}"""
    found = {}
    for name, case in cases.items():
        answers = case["tools"]
        for what in ASKED:
            if own in answers and answers[own]["right"][what] is False:
                rivals = [tool for tool in answers if answers[tool]["right"][what]]
                found |= {f"{name}: {what}": rivals} if rivals else {}
    return found


def table(sums):
    """The table of README.md, the best tool first."""
    head = ("tool", "all that is asked", *ASKED)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]

    def rank(tool):
        return [sums[tool].get(what, [0])[0] for what in ("wholly right", "op", "line", "module")]

    for tool in sorted(sums, key=rank, reverse=True):
        whole = sums[tool]["wholly right"] if "verdict" in sums[tool] else None
        cells = [whole, *(sums[tool].get(what) for what in ASKED)]
        told = [f"{cell[0]} of {cell[1]}" if cell else "–" for cell in cells]
        lines.append(f"| {tool} | {' | '.join(told)} |")
    return "\n".join(lines)


def main(argv=None):
    parser = record.arguments(__doc__, "cpu")
    parser.add_argument("--fresh", action="store_true", help="the ten cases that were held out")
    parser.add_argument("--only", default="*", help="pattern of case names")
    parser.add_argument("--tool", default=["*"], nargs="+", help="patterns of files in tools/")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    args.smoke |= args.only != "*" or args.tool != ["*"]  # a part is no result
    cases = FRESH if args.fresh else CASES
    tools = tools_here(args.tool)
    rows = {
        name: {"kind": case.kind, "cite": case.cite, "tools": {}}
        for name, case in cases.items()
        if fnmatch(name, args.only)
    }
    for tool in tools.values():
        initials = "  ".join(what[0] for what in ASKED)
        print(f"\n{tool.NAME:50} {initials}  ({', '.join(ASKED)}; . = not asked)")
        for name, row in rows.items():
            done = trial(tool, cases[name]) | {"kind": row["kind"]}
            row["tools"][tool.NAME] = done
            signs = [{True: "+", False: "-", None: "."}[done["right"][what]] for what in ASKED]
            said = done["crash"] or " | ".join(str(part) for part in done["said"].values() if part)
            wrong = False in done["right"].values()
            print(f"{name:50} {'  '.join(signs)}  {said if wrong else ''}"[:200])
    sums = {
        name: totals([row["tools"][name] for row in rows.values()], tool.SAYS)
        for name, tool in tools.items()
    }
    print(f"\n{table(sums)}")
    head = record.header("diagnosis_fresh" if args.fresh else "diagnosis", args)
    head |= {"versions": {name: version(tool) for name, tool in tools.items() if version(tool)}}
    head |= {"totals": sums, "rivals right where autopsy is not": beaten(rows), "cases": rows}
    record.write(head, args, ("cases",))


if __name__ == "__main__":
    main()
