# SPDX-License-Identifier: MIT (finite 3.1.0, 2026-11-25)
"""
Autopsy: name the operation that made the first bad number, and say which of a few things was wrong.

A bad loss names nobody. A forward hook names the module that *received* the inf: between two
Linears, `log(h * 0 - 1)` makes the second Linear look guilty. Autograd's anomaly mode passes over
inf. And `sqrt` at 0 has a finite loss: only its backward is infinite. So the step is run again,
and the result of every aten operation is read, forward and backward:

Paste::

    import torch
    from autopsy import Locator
    net = torch.nn.Linear(4, 1)
    with Locator(net) as where:
        loss = net(torch.randn(8, 4)).sub(99).log().mean()
        loss.backward()
    print(where.blame([loss]))

1. An operation with good inputs and a bad result is a birth. Every bad result inherits the births
   of its inputs. The guilty birth is the first among the ancestors of the loss (if the loss is
   finite: of the gradients). So what is swallowed on the way is never blamed: a mask of -inf that
   softmax turns to 0, log(0) behind a `where`, a NaN target that is left out. A -inf that enters a
   sum or a matrix product is no mask: then its maker is guilty. "Bad" is NaN, inf, or beyond
   1.8e19, whose square is inf in fp32.
2. The verdict follows from where the guilty result comes from:

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

3. The guilty operation is repeated on the same inputs in fp32 and fp64, and cures are tried: for
   precision the guilty module in fp32, its parents, fp32 at that line, bf16; for divergence an eps.

In a loop of your own, the step is recorded and examined (docs/recipes.md):

    record = StepRecord(step, net)            before the forward: RNG states, buffers, hidden states
    record.keep(images, labels)               each micro-batch, by reference, as the loader gave it
    report = examine(run_step, record, net)   after a rejected step; the weights are still those

`python autopsy YOUR_SCRIPT.py` needs no change of the script. This folder changes no weights. Copy
the folder, or the one file that `bash run.sh pack` makes of it (autopsy.pyz). It needs only torch.

The files. Each answers one question, and imports only files above it. The examination, which a loop
of your own may import:

    tensors       what does a tensor hold?              frames      which line of the script?
    facts         the types of what is found            advice      what to write instead
    report        what is said                          operations  what is known of an operation
    labels        which label is out of range?          samples     which samples of the batch?
    step          a step's state, kept and put back     locator     who made the bad number?
    module_stack  in which module is the step?          rerun       the recorded step once more
    modes         other ways to run a step              cures       what helps?
    verdict       which of the nine is it?

Three folders beside it. The examination never imports them, and silent/ and before/ may be deleted:

    watch/        runs somebody's script, and calls the examination at the first bad number
    silent/       faults that make no NaN: a file a check; watch/events.py says what they are told
    before/       two questions that one may ask before anything is bad (docs/autopsy.md)
"""

from .advice import Verdict
from .locator import Locator
from .report import Report, agree
from .step import StepRecord
from .verdict import examine

__all__ = ["Locator", "Report", "StepRecord", "Verdict", "agree", "examine"]
