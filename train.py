"""
finite: train an image model in low precision, and keep every non-finite number out of its weights.

    python train.py                                         CIFAR-10, best precision of this machine
    python train.py --precision fp16 --epochs 8 --out-dir runs/a
    python train.py --epochs 8 --out-dir runs/a --resume auto     goes on where runs/a was killed
    torchrun --standalone --nproc_per_node=2 train.py       one process a GPU; the same batch, split

The last line of standard output is one JSON object, whenever the arguments were accepted:

    {"status": "done", "model": "cifarnet", ..., "updates": 300, "skipped": 0, "val_acc1": 80.1}

Exit codes: 0 done, 1 failed (a bug, a full disk, no memory), 2 bad arguments, 3 diverged,
4 bad data, 5 suspected hardware, 128+n stopped by signal n with a checkpoint on disk.

Written to be read from top to bottom and changed: no trainer class, no callbacks, no config files.

    train_step    the step: forward, backward, decide, step the optimizer
    train         the loop; log_verdict() reads what happened, respond() acts on it
    conclude      how the run ended: "done" is a claim that is checked
    prepare.py    every decision before the first step, in order
"""

import contextlib
import errno
import os
import sys
import time
import traceback

import torch

import checkpoint
import optim
import ranks
import report
from data import NAMES, batches
from extras import graphs
from models import MODELS
from trainer import flags, prepare, resume, validation
from trainer.record import End, Finding, Kind, Run

# --- The step


def train_step(run, images, labels, inspect=None, eager=False):
    """The part of a step that runs on the device. It has no host sync and no branch on a value, so
    a CUDA graph can hold it. Call run.guard.open(step) before it, and run.guard.verdict() after it.

    inspect: a function to call between the last backward and the decision. eager: run the model
    without compiled code, which ignores the hooks of this step. Returns found_inf: 1. = rejected.
    """
    guard, scaler = run.guard, run.scaler
    forward = run.model  # one process and no compiler
    if run.ddp is not None:
        forward = run.ddp if eager else run.compiled
    # 1. Every micro-batch: what looks bad raises a flag on the device and nothing else. Leaving
    #    early would make the ranks average different steps.
    sums = {}
    pieces = list(zip(images.chunk(run.accum), labels.chunk(run.accum), strict=True))
    for i, (x, y) in enumerate(pieces):
        y = guard.see_batch(x, y)
        share = len(x) / len(images)  # an uneven last micro-batch weighs what it holds
        more_to_come = run.world_size > 1 and i + 1 < len(pieces)
        with run.ddp.no_sync() if more_to_come else contextlib.nullcontext():  # DDP averages once
            # forward: under autocast, the loss in fp32
            with run.policy.autocast():
                loss, metrics = forward(x, y)
            guard.see_loss(loss)
            # backward: of the scaled loss
            part = loss if share == 1 else loss * share
            ranks.backward(scaler.scale(part), run.ddp, run.veto)
        # for the log: means over the batch
        for name, value in (metrics | {"loss": loss.detach()}).items():
            mean = value.mean() if value.ndim else value
            sums[name] = mean if share == 1 else sums.get(name, 0.0) + mean * share
    if inspect:
        inspect()
    if run.schedule:
        sums["lr"] = run.schedule.lr
    if run.world_size > 1:
        guard.carry(f"loss of rank {run.rank}", sums["loss"])
    # 2. Decide once, at one place, on every rank: one all-reduce of the flags. Gradients need none,
    #    DDP made them equal.
    # 3. Step the optimizer: measure, unscale, clip, skip and AdamW in one pass. Clipping before
    #    the verdict would turn one NaN into a model of NaNs; clipping before unscaling would
    #    compare the norm with 65536 times the limit.
    found_inf = guard.step(run.optimizers, scaler, clip=run.clip, **sums, scale=scaler.scale_tensor)
    # 4. Rejected: BatchNorm's statistics went back too. Accepted: schedule and average move. The
    #    schedule counts accepted updates only, the loss scale learns from both.
    if run.schedule:
        run.schedule.update(found_inf)
    scaler.update(found_inf=found_inf)
    if run.ema:
        run.ema.update(optim.master_params(run.optimizers).values(), found_inf)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    return found_inf


def take_step(run, step, images, labels, signal=0):
    """One step between open() and verdict(): as a CUDA graph, or kernel by kernel. Returns the
    verdict on the step before, or None."""
    watch = run.rescue.watch(run, step, images, labels)
    # cuDNN looks for its fastest kernels where a step is taken, and nowhere else: 40 searches.
    torch.backends.cudnn.benchmark = run.device.type == "cuda" and not run.args.deterministic
    run.guard.open(step)
    while True:  # until the step fits into memory
        if signal:
            run.guard.carry("signal", signal)
        try:
            if run.graph and not watch.inspect and not watch.eager:
                run.graph(images, labels)
            else:
                train_step(run, images, labels, watch.inspect, watch.eager)
            break
        except RuntimeError as error:
            run.rescue.make_room(run, error)  # raises what is not about memory
    torch.backends.cudnn.benchmark = False
    # 5. What happened reaches the host one step late: the device never waits for a question.
    verdict = run.guard.verdict()
    watch.end()
    return verdict


# --- The loop


def main(argv=None):
    args = flags.parse(argv, __doc__, MODELS, NAMES)
    if args.replay:
        return prepare.rescuer().replay(args.replay)
    run = Run(args=args)
    with checkpoint.StopSignals(at_once=True) as stop:
        try:
            prepare.setup(run, train_step)
            stop.at_once = False  # from now on there is something to save first
            end = train(run, stop)
        except checkpoint.Stopped as signal:
            end = End(f"stopped by signal {signal}", 128 + signal.args[0], "during set-up")
            print(f"train.py: {end.status} {end.reason}, nothing is saved", file=sys.stderr)
        except Exception as error:
            end = End("failed", 1, str(error))
            explain(error)
        return finish(run, end)


def train(run, stop):
    """The loop. Returns how the run ended."""
    end = None
    ranks.name_missing(lambda: run.guard.number)
    with run.checkpoints, run.bar:
        if ranks.agreed(not run.step or not run.checkpoints.last_good.exists()):
            save(run, good=True)  # there is always a last_good to go back to
            run.checkpoints.wait()  # a kill may strike as soon as a step is logged
        if run.step >= run.total_steps:  # a run that was finished before is started again
            if not run.scores:
                end = validate(run)
            return end or conclude(run)
        run.model.train()
        while end is None:
            run.step += 1
            began = time.perf_counter()
            # load the batch
            images, labels = run.rescue.begin(run, *run.stream.at(run.step - 1))
            # shortly after a bad step each verdict is read at once; what was under way comes first
            findings = []
            lag = not run.rescue.reads_at_once(run)
            if lag != run.guard.lag:
                findings = log_verdict(run, run.guard.flush())
                run.guard.set_lag(lag)
            # forward, backward, decide, step the optimizer
            verdict = take_step(run, run.step, images, labels, stop.number)
            # log what happened, and respond to it
            findings += log_verdict(run, verdict)
            end = respond(run, findings)
            # validate and save when it is time
            end = end_of_step(run, end, began)
    return end


def log_verdict(run, verdict):
    """The host's side of a step: count it and log it. Returns what the run must respond to, the
    same on every rank."""
    if verdict is None:
        return []
    step = verdict.step
    run.updates += verdict.accepted
    stats = {**verdict.stats, "updates": run.updates}
    findings = run.rescue.findings(run, verdict)
    if not verdict.accepted and "veto" not in verdict.reasons:
        run.log.write(event="skip", step=step, reasons=verdict.reasons, rank=verdict.rank, **stats)
        in_a_row = run.guard.skipped_in_a_row
        if run.args.on_nonfinite == "stop" or in_a_row >= run.args.max_skips:
            why = f"{in_a_row} steps in a row were rejected, the last one for "
            why += ", ".join(verdict.reasons)
            findings.append(Finding(Kind.TOO_MANY, step, verdict, why))
    if verdict.carried["signal"]:
        findings.append(Finding(Kind.SIGNAL, step, verdict))
    if step % run.args.log_every == 0:
        run.log.write(step=step, **stats, skipped=run.guard.skipped)
        run.bar.set_postfix({name: f"{value:.4g}" for name, value in stats.items()})
    return findings


def goes_on(end):
    """Whether the run has no end yet, or only a signal stops it, which waits for open findings."""
    return end is None or end.code > 128


def respond(run, findings):
    """Respond to what was found. Returns the end of the run, or None."""
    end = None
    for finding in findings:  # it may grow
        if finding.kind is Kind.SIGNAL:
            number = int(finding.verdict.carried["signal"])
            end = end or End(f"stopped by signal {number}", 128 + number)
        elif finding.kind is Kind.TOO_MANY:
            end = End("diverged", 3, finding.reason)
        elif goes_on(end):
            other, more = run.rescue.respond(run, finding, again)
            end = other or end
            findings += more
    return end


def again(run, step, images, labels):
    """Take a step once more. Returns what was found."""
    before = take_step(run, step, images, labels)
    return log_verdict(run, before) + log_verdict(run, run.guard.flush())


def end_of_step(run, end, began):
    """Validate at the end of an epoch, or of some short ones; save when due. Returns the end of the
    run, or None."""
    last = run.step >= run.total_steps
    validates = last or run.step % run.validate_every == 0
    saves = validates or run.step % (run.args.ckpt_every or run.validate_every) == 0
    if saves and goes_on(end):
        findings = log_verdict(run, run.guard.flush())  # the clock counts this step, too
        end = respond(run, findings) or end
    run.speed.images += run.args.batch_size
    run.speed.seconds += time.perf_counter() - began
    run.bar.update()
    if validates and goes_on(end):
        end = validate(run) or end
    if goes_on(end) and (saves or end):
        end = save(run, good=saves) or end
    if goes_on(end) and run.step >= run.total_steps:  # a turn back has made the run longer
        end = conclude(run)
    run.checkpoints.poll()
    return end


def validate(run):
    """Validate. Go back if the validation says that the model is lost."""
    validation.validate(run)
    return turn_back_if(run, run.rescue.unsound(run))


def turn_back_if(run, reason):
    """Respond to a run that has lost what it learnt; reason "": it has not."""
    if not reason:
        return None
    return respond(run, [Finding(Kind.LOST, run.step, None, reason)])


def save(run, good):
    """Save, unless the state holds a non-finite number: then the run goes back. good: the state may
    become last_good, if nothing is suspicious."""
    ranks.share_buffers(run.net)
    bad = resume.save(run, good and run.rescue.vouches(run))
    if not bad:
        return None
    run.log.write(event="save refused", step=run.step, tensors=bad)
    return turn_back_if(run, f"non-finite at a save: {', '.join(bad[:3])}")


def conclude(run):
    """How did the run end? validate() and save() come just before: they prove a sound validation
    and a finite state on disk. This function checks that most steps were accepted, each tensor has
    learnt, and nothing is suspicious."""
    resume.read_back(run)  # raises where it is not on disk
    if reasons := run.rescue.objections(run):
        return End("diverged", 3, "; ".join(reasons))
    if run.rank == 0:
        run.checkpoints.previous.unlink(missing_ok=True)  # last.pt was read back
    return End("done", 0)


def explain(error):
    """Print a sentence on standard error if we know what to do, else the traceback of a bug."""
    with_less_memory = "try: the same command with twice the --accum-steps, and --resume auto"
    advice = {
        torch.OutOfMemoryError: with_less_memory,
        graphs.NoGraph: "try: --no-cuda-graph",
        checkpoint.CheckpointError: "",
        batches.ImagesLost: "",
    }
    disk_is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    with contextlib.suppress(OSError):  # standard error may be on that disk
        if disk_is_full or type(error) in advice:
            print(f"train.py: {error}\n  {advice.get(type(error), '')}".rstrip(), file=sys.stderr)
        else:
            traceback.print_exception(error)
            if torch.is_anomaly_enabled() and isinstance(error, RuntimeError):
                print(
                    "train.py: --detect-anomaly ends a run at its first NaN: without the flag, and "
                    "with --resume auto, the run goes on and examines such a step",
                    file=sys.stderr,
                )


def finish(run, end):
    """Print the summary as the last line of standard output, however the run ended."""
    args = run.args
    summary = {
        "status": end.status,
        "reason": end.reason,
        "model": args.model,
        "dataset": args.dataset,
        "precision": run.policy.name if run.policy else args.precision,
        "steps": run.step,
        "updates": run.updates,
        "skipped": run.guard.skipped if run.guard else 0,
        **run.rescue.summary(run),
        "quarantined": sorted(run.stream.quarantine) if run.stream else [],
        **run.scores,
        "warnings": run.log.warnings if run.log else [],
        "seconds": round(time.time() - run.began, 1),
        "images_per_second": round(run.speed.images / max(run.speed.seconds, 1e-9), 1),
        "peak_memory_mb": report.peak_memory_mb(run.device.type == "cuda"),
    }
    if run.log:
        try:
            run.log.write(event="end", **summary)
        except Exception as error:  # a full disk, say: the line below is printed all the same
            explain(error)
        try:
            if run.rank == 0:
                report.draw_curves(run.log.path)
                report.draw_confusion(run.log.path)
        except Exception as error:
            run.log.say(f"curves.png is not drawn: {type(error).__name__}: {error}")
    if ranks.is_main_process():
        report.print_last(summary)
    # Together: not where one rank was stopped during set-up.
    if ranks.together() and run.bar and end.status != "failed":
        run.ddp = run.compiled = None  # before its group
        ranks.leave()
    return end.code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if "RANK" in os.environ:
        os._exit(code)  # gloo's threads sometimes abort a process that has ended well
    sys.exit(code)
