# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Autopsy: name the operation that made the first bad number, and say which of a few things was wrong.

A bad loss names nobody. A forward hook names the module that *received* the inf: between two
Linears, `log(h * 0 - 1)` makes a hook name the second Linear. Autograd's anomaly mode passes over
inf. And `sqrt` at 0 has a finite loss: only its backward is infinite. So the step is run again,
and the result of every aten operation is read, forward and backward:

Paste::

    import torch
    from autopsy import Locator
    net = torch.nn.Linear(4, 1)
    with Locator(net) as where:
        loss = net(torch.randn(8, 4)).sub(99).log().mean()
        loss.backward()
    print(where.origin_of([loss]))

1. The origin is the first operation whose inputs are finite and whose result is not. A later
   non-finite result has the origins of its inputs. The report names the earliest origin on which
   the loss depends (if the loss is finite: a gradient). So a value that is discarded on the way is
   never named: a mask of -inf before softmax, log(0) behind torch.where, a NaN target that is left
   out. A -inf that enters a sum or a matrix product is not a mask: then the operation that made it
   is the origin. "Bad" means NaN, inf, or a magnitude above 1.8e19, whose square is inf in fp32.
2. The verdict says where the bad number comes from:

    weights            from a parameter, buffer or hidden state that was bad before the step
    data               from a bad value in the batch, a label out of range, labels that are all
                       ignored, NumPy, or a number that the script writes itself
    precision          from an operation; in fp32 the step is finite
    divergence         from an operation; the step is bad in fp32 too
    calibration        nothing is bad at loss scale 1
    compiler           nothing is bad in eager mode, but the compiled step is
    not reproducible   nothing is bad the second time
    error              the step raised an exception, and no bad number is the cause
    optimizer          good gradients, and bad weights after the step (only the watch says so)

3. The operation is repeated on the same inputs in fp32 and fp64, and cures are tried: for precision
   its module in fp32, the module's parents, fp32 at that line, bf16; for divergence an eps.

In a loop of your own, the step is recorded and examined (docs/recipes.md):

    record = StepRecord(step, net)            before the forward: RNG states, buffers, hidden states
    record.keep(images, labels)               each micro-batch, by reference, as the loader gave it
    report = examine(run_step, record, net)   after a rejected step; the weights are still those

`python autopsy YOUR_SCRIPT.py` needs no change of the script. Whatever a repeated step changes
(buffers, random numbers, gradients) is put back, and no file here changes weights. Copy the folder,
or the one file that `bash run.sh pack` makes of it (autopsy.pyz). It needs only torch.

The files. Each answers one question, and imports only files above it. The examination, which a loop
of your own may import:

    tensors       what does a tensor hold?              frames      which line of the script?
    facts         the types of what is found            advice      what to write instead
    report        what is said                          operations  what is known of an operation
    labels        which label is out of range?          samples     which samples of the batch?
    step          a step's state, kept and put back     sources     what held it from the beginning?
    module_stack  in which module is the step?          locator     which operation made it?
    modes         other ways to run a step              rerun       the recorded step once more
    cures         what helps?                           verdict     which of the nine is it?

Four folders beside it. The examination never imports them, and all but watch/ may be deleted:

    watch/        runs somebody's script, and calls the examination at the first bad number
    silent/       faults that make no NaN: a file a check; watch/events.py says what they are told
    before/       two questions that one may ask before anything is bad (docs/autopsy.md)
    describe/     what a loop does, as facts, for its author to compare with what was meant
"""

from .advice import Verdict
from .locator import Locator
from .report import Report, agree
from .step import StepRecord
from .verdict import examine

__all__ = ["Locator", "Report", "StepRecord", "Verdict", "agree", "examine"]
