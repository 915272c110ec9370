"""
All failures, one after the other, and one table: python failures/run_all.py

It takes about two minutes on two cores.

It prints the table and the claims of each case, then one line for each case, as they stand in
failures/TABLE.md. It exits with 1 if a claim failed.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from failures import (
    more_batchnorm_buffers,
    more_bf16_weights,
    more_fp16_loss,
    more_loss_scale_zero,
    more_one_rank_skips,
    more_order_of_calls,
    nanovlm_masked_rows,
    opendit_modulate_kernel,
    swin_attention_overflow,
    through_train,
    trellis_adamw_fp16,
    vmamba_eval_nan,
)
from failures.loops import Case, show

FILES = (
    vmamba_eval_nan,
    swin_attention_overflow,
    nanovlm_masked_rows,
    trellis_adamw_fp16,
    opendit_modulate_kernel,
    through_train,
    more_batchnorm_buffers,
    more_loss_scale_zero,
    more_bf16_weights,
    more_one_rank_skips,
    more_order_of_calls,
    more_fp16_loss,
)


def markdown(cases: list[tuple[str, Case]]) -> str:
    """One row for each case: its first row, which is the reported one."""
    lines = [
        "# Published failures, run here\n",
        '`bash run.sh failures` prints this table. "@ 5" means at step 5.\n',
        "| case | dtype | as published | guarded: what is named | cured | holds |",
        "|---|---|---|---|---|---|",
    ]
    for file, case in cases:
        dtype, *cells = (str(cell).replace("|", "/") for cell in case.rows[0])
        holds = "yes" if case.holds else "**NO**"
        lines.append(f"| [{case.name}]({file}) | {dtype} | {' | '.join(cells)} | {holds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    cases = []
    code = 0
    for module in FILES:
        start = time.time()
        made = module.case()
        made = made if isinstance(made, list) else [made]
        code |= show(*made)
        print(f"  ({time.time() - start:.0f} s, {Path(module.__file__).name})\n", flush=True)
        cases += [(Path(module.__file__).name, case) for case in made]
    print(markdown(cases), end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
