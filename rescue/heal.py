"""
Heal: what to do about a bad step that keeps coming back. A ladder of responses, each bounded.

A guard that only skips is a guard that stalls: when one module overflows in fp16 at every step,
every step is skipped, the loss scale falls to its floor, and the run stands still without an error.
So autopsy/ examines every rejected step, and heal.py responds to its verdict:

    precision          finite in fp32           that module runs in fp32 from now on. If there is no
                                                such module, or it is in fp32 already, the run goes
                                                fp16 -> bf16 (native only) -> fp32
    data               a bad input or label     the samples are named and never drawn again (not if
                                                the whole batch is bad); over 1 % of the steps:
                                                exit 4
    weights            bad before the step      back to last_good, past these batches
    divergence         bad in fp32 too          back to last_good, past these batches, with half the
                                                learning rate
    compiler           finite in eager mode     the run goes on in eager mode
    calibration        finite at loss scale 1   nothing: the loss scale falls by itself
    not reproducible   finite the second time   passed over; the fifth time: exit 5, suspect the
                                                hardware

The host learns of a rejection one step late. It then rebuilds the step from its number (batches are
a pure function of the step) and examines it with the weights of one update later: enough for data,
weights and precision. It records the next 50 steps before they run, so that it can examine a fault
that comes back exactly as it was. Only then does it believe "divergence" and "not reproducible".

A run that goes back becomes longer by the steps that it takes back: the schedule goes back with the
weights, and ends where it should. --max-cures bounds the number of cures.

Every rank holds the same report (autopsy.agree) and takes the same turn. notice.py notices a run
that is lost with finite numbers, capsule.py takes a recorded step to another machine, resume.py
restores a state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

import amp_policy
import autopsy
import ranks
from autopsy.advice import Advice, Verdict
from autopsy.facts import Where
from fp32 import fp32_eval, keep_fp32, pinned
from rescue import capsule
from trainer import resume, schema
from trainer.record import EAGER_MODE, End, Run

# Verdicts that change the run
LASTING = (Verdict.PRECISION, Verdict.WEIGHTS, Verdict.DIVERGENCE, Verdict.COMPILER)
# Verdicts that suspect the hardware at the fifth time; calibration where the scale is at its floor
OF_HARDWARE = (Verdict.NOT_REPRODUCIBLE, Verdict.CALIBRATION)


class Cure(NamedTuple):
    """What autopsy found about a step, what the run did, and whether it ends here."""

    report: autopsy.Report
    action: str  # a sentence; "": nothing was done, the loss scale is finding its place
    end: End | None = None


# --- The step once more


def record_step(run: Run, step: int, images: Tensor, labels: Tensor) -> autopsy.StepRecord:
    """Record what examine() needs of a step: RNG and buffers as they are now, and its batches."""
    kept = autopsy.StepRecord(step, run.net, rank=run.rank)
    batch = images, labels, run.stream.indices(step - 1)
    for x, y, indices in zip(*(t.chunk(run.accum) for t in batch), strict=True):
        kept.keep(x, y, indices=indices)
    return kept


def batch_again(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """The batch of a past step, with the faults that were planted in it."""
    run.injector.begin(step)  # not those of weights: these are as they are
    return run.injector.batch(*run.stream.at(step - 1))


def rerun(run: Run, kept: autopsy.StepRecord, model: nn.Module | None = None) -> Callable:
    """For autopsy.examine: forward and backward of one recorded micro-batch, at loss scale 1,
    without DDP. Needs run.net, run.model, run.policy and run.injector."""

    def run_step(batch: tuple, fp32: bool) -> tuple[Tensor, dict]:
        number = next(i for i, recorded in enumerate(kept.batches) if recorded is batch)
        run.injector.repeat(number)
        return forward_backward(run, batch, fp32, model)

    return run_step


def forward_backward(
    run: Run, batch: tuple, fp32: bool = False, model: nn.Module | None = None, pieces: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name of a micro-batch: whole, or in 2, 4, ... pieces, as many as it
    takes to fit into memory. (What just fits in training may not fit in fp32.)"""
    total = 0.0
    try:
        with fp32_eval(run.net) if fp32 else nullcontext():
            for x, y in zip(*(t.chunk(pieces) for t in batch), strict=True):
                with nullcontext() if fp32 else run.policy.autocast():
                    loss, _ = (model or run.model)(x, y)
                loss = loss * (len(x) / len(batch[0]))
                loss.backward()  # outside of autocast: it would cast an island's gradients to half
                total += loss.detach()
            # Inside fp32_eval: its fp32 copies of half parameters hold the gradients.
            return total, {name: p.grad for name, p in run.net.named_parameters()}
    except RuntimeError as error:
        if pieces >= len(batch[0]) or not ranks.out_of_memory(error):
            raise
    run.net.zero_grad(set_to_none=True)
    return forward_backward(run, batch, fp32, model, 2 * pieces)


# --- The turn


def examine_and_heal(run: Run, step: int, kept: autopsy.StepRecord | None = None) -> Cure:
    """Examine a rejected step and respond. kept: its record, made before the step. The first time,
    the guilty rank writes a capsule."""
    recorded = kept is not None
    kept = kept or record_step(run, step, *batch_again(run, step))
    compiled = None
    if run.compiled is not run.ddp:  # the same code without DDP; it is compiled anew
        compiled = rerun(run, kept, torch.compile(run.model, dynamic=False))
    moments = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    report = autopsy.agree(
        autopsy.examine(
            rerun(run, kept),
            kept,
            run.net,
            state=dict(enumerate(moments)),
            num_classes=run.guard.num_classes,
            precision=run.policy.name,
            scale=float(run.scaler.scale_tensor),
            advice="flags",
            run_compiled=compiled,
        )
    )
    harmless = report.verdict in (Verdict.CALIBRATION, Verdict.NOT_REPRODUCIBLE)
    if harmless and report.scale > run.scaler.floor:
        return Cure(report, "")  # the loss scale was too high, and it can fall
    if report.rank == run.rank and not any(run.folder.glob("bad_step_*")):
        capsule.save(run.folder / f"bad_step_{step}_rank{run.rank}.pt", run, kept, report)
    if report.verdict in (Verdict.DIVERGENCE, Verdict.NOT_REPRODUCIBLE) and not recorded:
        return Cure(
            report, "passed over: one step alone; if one of the next 50 is like it, the run acts"
        )
    cure = respond(run, report)
    if report.verdict is not Verdict.DATA:  # steps before the cure would show the same again
        run.healing.examined_until = run.step
    return cure


def respond(run: Run, report: autopsy.Report) -> Cure:
    """Do what the verdict asks for: one rung of the ladder."""
    verdict = report.verdict
    cures = run.healing.cures
    cures.append(str(verdict))
    end = None
    if verdict in LASTING and sum(cure in LASTING for cure in cures) > run.args.max_cures:
        action = f"gave up after {run.args.max_cures} cures"
        end = End("diverged", 3, report.symptom)
    elif verdict is Verdict.DATA:
        if cures.count(verdict) > max(3, 0.01 * report.step):
            end = End("bad data", 4, report.symptom)
        action = "passed over"
        whole = 1 < len(report.samples) == report.batch_size
        if whole:  # what made the batch may be at fault; a bad sample is bad in the next one, too
            action += ", all of its samples are bad: none is left out"
        elif report.indices:  # else no sample was named
            run.stream.leave_out(report.indices)
            action += ", these samples are never drawn again"
    elif verdict is Verdict.COMPILER:
        run.compiled = run.ddp
        run.healing.healed.append(EAGER_MODE)
        action = "the run goes on in eager mode: --compile is given up"
    elif verdict is Verdict.PRECISION:
        action = more_precise(run, report)
    elif verdict in (Verdict.WEIGHTS, Verdict.DIVERGENCE):
        action = rewind(run, slower=verdict is Verdict.DIVERGENCE)
    else:  # an error when it ran again, too: --max-skips bounds what no branch answers
        action = "passed over"
        if verdict in OF_HARDWARE and cures.count(verdict) >= 5:
            end = End("suspected hardware", 5, report.symptom)
    return Cure(report, action, end)


def more_precise(run: Run, report: autopsy.Report) -> str:
    """Put the guilty module into fp32; else go fp16 -> bf16 (if the chip has it) -> fp32."""
    of_module = report.cure and report.cure.where is Where.MODULE
    name = report.cure.name if of_module else ""  # or a pattern: all attentions
    keep_output = of_module and report.cure.keeps_output
    before = pinned(run.net, keep_output=keep_output)
    if name:
        keep_fp32(run.net, [name], keep_output=keep_output)
    if pinned(run.net, keep_output=keep_output) != before:
        run.guard.watch(run.net)  # pinning may have exchanged buffers
        run.healing.healed.append(name)
        return f"{name} is kept in fp32 from now on" + (", its result too" if keep_output else "")
    if run.policy.dtype not in amp_policy.HALF:
        return rewind(run)
    native = amp_policy.capabilities(run.device).native_bf16
    resume.adopt(run, "bf16" if run.policy.dtype is torch.float16 and native else "fp32")
    run.healing.healed.append(run.policy.name)
    return f"no single module is left to keep in fp32: the run goes on in {run.policy.name}"


def load_last_good(run: Run) -> dict:
    """Its state, on every rank, as soon as rank 0 has written the file."""
    run.checkpoints.wait()
    ranks.agreed(None)
    return schema.load(run.checkpoints.last_good)


def rewind(run: Run, slower: bool = False) -> str:
    """Restore weights, moments and average of last_good. The data goes on where it is."""
    state = load_last_good(run)
    factor = run.schedule.factor * (0.5 if slower else 1.0)  # it outlives the turn back
    resume.restore(run, state)
    run.schedule.slow_down(factor / run.schedule.factor)
    # With what the schedule has left; an earlier turn to this state has made it longer already.
    extra = run.step - state["step"] + state["healing"]["extra_steps"]
    run.total_steps += extra - run.healing.extra_steps
    run.healing.extra_steps = extra
    run.healing.walked = {}  # perhaps with the update of a bad moment
    rate = "" if factor == 1 else f", learning rate x {float(factor):g}"
    said = f"back to the weights of step {state['step']}{rate}"
    run.log.warnings.append(f"step {run.step}: {said}")  # for the summary
    return said


def diverged(run: Run, symptom: str) -> Cure:
    """Respond to a run that is lost with finite numbers, or whose state is non-finite."""
    report = autopsy.Report(
        verdict=Verdict.DIVERGENCE,
        step=run.step,
        rank=run.rank,
        precision=run.policy.name,
        symptom=symptom,
        fix=Advice("if it comes back: a lower --lr, or more --warmup-updates"),
    )
    run.healing.trend.suspicions = {}
    if run.args.on_nonfinite != "heal":
        return Cure(report, "the run ends", End("diverged", 3, symptom))
    return respond(run, report)


def log_cure(run: Run, cure: Cure) -> None:
    """Log and print what healing found and did. A loss scale that finds its place is no news."""
    if run.graph:
        run.graph.drop()  # a cure may have exchanged what the graph holds
    if cure.action:
        about = cure.report
        run.log.write(
            event="cure",
            step=run.step,
            of_step=about.step,
            verdict=about.verdict,
            rank=about.rank,
            module=about.module,
            op=about.op,
            samples=about.indices,
            reason=about.symptom,
            action=cure.action,
        )
        run.log.say(f"{about}\n  -> {cure.action}")
