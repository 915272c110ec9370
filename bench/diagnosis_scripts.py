"""
How often does `python autopsy SCRIPT` name the fault of a script?

    python bench/diagnosis_scripts.py        # a process a script: two minutes on two CPU cores

The 40 scripts, their reports and the right answers are those of bench/scripts/reported.py.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record
from bench.scripts import reported, run_all


def main():
    parser = record.arguments(__doc__, "cpu")
    parser.add_argument("--only", default=".", help="a pattern that the names must match")
    args = parser.parse_args()
    rows = {}
    for case, code, said in run_all([c for c in reported.CASES if re.search(args.only, c.name)]):
        right = case.judge(code, said)
        rows[case.name] = {
            "right": right,
            "whole": all(right.values()),
            "said": said[-1500:],
            "second run": "runs again" in said,
        }
        print(f"{case.name:32} {'right' if all(right.values()) else 'wrong'} {right}")
    head = record.header("diagnosis_scripts", args)
    head["wholly right"] = [sum(row["whole"] for row in rows.values()), len(rows)]
    head["second runs"] = sum(row["second run"] for row in rows.values())
    record.write(head | {"cases": rows}, args, ("cases",))


if __name__ == "__main__":
    main()
