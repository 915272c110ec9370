"""Finite and wrong: what does `python autopsy SCRIPT.py` say of a run without a NaN?

On 30 healthy scripts autopsy must stay silent. Each of 20 faulty ones has regular expressions for
its output, which we wrote before we ran the tool on any of them (bench/scripts/finite.py). The
first run is finite_faults-first-cpu.json: 29 and 17. Then we corrected two faulty scripts, because
their loss did not jump at all (the row of padding had an easy label, the rate of 1.2 did no harm:
12 does).

    python bench/finite_faults.py [NAME...]      with names: prints their output, writes no file
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record
from bench.scripts import run_all
from bench.scripts.finite import CASES, FAULTY, HEALTHY


def main():
    parser = record.arguments(__doc__, "cpu")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    rows = {}
    for case, code, said in run_all([c for c in CASES if c.name in args.names or not args.names]):
        right = all(case.judge(code, said).values())
        if case.name in HEALTHY:
            right = right and not said
        rows[case.name] = {"right": right, "code": code, "said": said}
        told = said.replace("\n", "\n    ")
        print(f"{'right' if right else 'WRONG'}  {case.name}\n    {told}")
    counts = {}
    for kind, names in (("healthy and silent", HEALTHY), ("faulty and named", FAULTY)):
        right = [row["right"] for name, row in rows.items() if name in names]
        counts[kind] = f"{sum(right)} of {len(right)}"
    args.smoke |= bool(args.names)
    record.write(record.header("finite_faults", args) | counts | {"rows": rows}, args, ("rows",))


if __name__ == "__main__":
    main()
