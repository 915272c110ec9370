"""
finite: train an image model in low precision, and keep every non-finite number out of its weights.

    python train.py                                         CIFAR-10, best precision this machine has
    python train.py --precision fp16 --epochs 8 --out-dir runs/a
    python train.py --epochs 8 --out-dir runs/a --resume auto       goes on where runs/a was killed
    torchrun --standalone --nproc_per_node=2 train.py       one process a GPU; the same batch, split

The last line of standard output is one JSON object, whenever the arguments were accepted:

    {"status": "done", "model": "cifarnet", ..., "updates": 300, "skipped": 0, "val_acc1": 80.1, ...}

Exit codes: 0 done, 1 failed (a bug, a full disk, no memory), 2 bad arguments, 3 diverged, 4 bad data, 5 suspected
hardware, 128+n stopped by signal n with a checkpoint on disk.

Written to be read from top to bottom and changed: no trainer class, no callbacks, no config files.

    Run           the record of a run: all that it is and all that changes
    train_step    the step: the only copy of it
    main          the loop
    setup         every decision before the first step, each with its reason
"""

import contextlib
import errno
import functools
import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import flags
import prepare
import report
import validation
from data import NAMES
from extras import graphs
from models import MODELS, wrap
from ranks import agreed, backward, quiet, refusing, share_buffers, speaks
from rescue import heal, probes, verify

CHECK_EVERY = 100  # steps between two looks at all parameters and optimizer state: a read of 12 bytes a parameter


@dataclass(kw_only=True)
class Run:
    """The record of a run: data and no methods. Each fact stands here once, and whoever changes it changes it here.

    train_step() needs model, policy, scaler, guard and optimizer. All else has a default, so that a bench, a test or a
    notebook can take the same step with five objects of its own.
    """

    args: Any = None  # the command line, with the model's recipe filled in
    began: float = field(default_factory=time.time)
    # Where it runs
    device: Any = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1
    # The data
    dataset: str = ""
    classes: list = field(default_factory=list)  # their names
    train: tuple = ()  # images uint8 (N, 3, H, W), labels int64 (N,)
    val: tuple = ()
    stream: Any = None  # training batches: a pure function of the step
    # One network, four names: bare; with its loss; under DistributedDataParallel; compiled
    net: Any = None
    model: Any = None  # model(images, labels) -> loss, metrics
    ddp: Any = None  # the model itself where there is one process
    compiled: Any = None  # ddp itself without --compile
    # What a step uses. A cure may exchange policy, scaler and accum.
    policy: Any = None
    scaler: Any = None
    asked: str = ""  # the precision of the start; a cure may have gone on from it
    accum: int = 1  # micro-batches an update
    guard: Any = None
    optimizer: Any = None
    average: Any = None  # averaged weights, or None
    injector: Any = None
    graph: Any = None  # the step as one CUDA graph, or None
    probes: Any = None  # hooks of this step, or None
    doubt: bool = False  # a save was refused: the next step is rejected and examined
    exact: bool | None = None  # whether the same pass gives the same bits on this device; None: not measured yet
    # What it leaves behind
    found: Any = None  # path and state of the checkpoint to go on from
    facts: dict = field(default_factory=dict)  # by which a resumed run knows itself again
    hardware: str = ""
    folder: Path = Path()
    checkpoints: Any = None
    log: Any = None
    bar: Any = None
    # Where it stands
    step: int = 0  # attempted
    total_steps: int = 0
    epoch_steps: int = 1
    updates: int = 0  # accepted steps, as far as the host has been told
    status: str = "done"  # or why the run ends
    code: int = 0
    losses: list = field(default_factory=lambda: [0.0, 0])  # sum and number of the accepted steps' in this epoch
    scores: dict = field(default_factory=dict)  # of the last validation
    best: float | None = None
    trained: int = 0  # images in this process's life
    busy: float = 0.0  # seconds of training, without validation
    tick: float = 0.0  # when training last went on
    # What healing has done
    healed: list = field(default_factory=list)  # modules now in fp32, precisions gone to
    cures: Counter = field(default_factory=Counter)  # by verdict
    hunt_until: int = 0  # after a bad step: the last step to record
    unexamined: list = field(default_factory=list)  # rejected steps
    again: list = field(default_factory=list)  # steps to take once more: memory ended in them, on some rank
    cured: int = 0  # the last step that ran before the last cure
    lost: str = ""  # what looks lost although it is finite, and has for long
    apart: Any = None  # a verdict in which two results differ that must be equal: the hardware is in doubt
    trend: dict = field(default_factory=lambda: {"seen": 0, "start": math.inf, "usual": 0.0, "high": 0, "dead": 0})


# --- The step

def train_step(run, images, labels, look=False, watched=False):
    """All of a step that happens on the device. No host sync, no branch on a value: a CUDA graph can hold it.

    Call run.guard.open(step) before it, and run.guard.verdict() after it.
    look: also check all weights and moments, and measure each tensor. watched: run the model without its compiled
    code, which ignores the hooks of this step.
    """
    guard, optimizer, scaler, average = run.guard, run.optimizer, run.scaler, run.average
    forward = run.ddp if watched else run.compiled
    if forward is None:  # one process and no compiler
        forward = run.model
    # 1. Every micro-batch: forward under autocast, loss in fp32, scaled backward. What looks bad raises a flag
    #    on the device and nothing else: leaving early would make the ranks average different steps.
    sums, micro_batches = {}, list(zip(images.chunk(run.accum), labels.chunk(run.accum), strict=True))
    for i, (x, y) in enumerate(micro_batches):
        y = guard.see_batch(x, y)
        share = len(x) / len(images)  # an uneven last micro-batch weighs what it holds
        wait = run.world_size > 1 and i + 1 < len(micro_batches)  # DDP averages once, in the last backward
        with run.ddp.no_sync() if wait else contextlib.nullcontext():
            with run.policy.autocast():
                loss, metrics = forward(x, y)
            guard.see_loss(loss)
            backward(scaler.scale(loss * share), run.ddp, lambda: heal.out_of_memory(run))
        for name, value in (metrics | {"loss": loss.detach()}).items():
            sums[name] = sums.get(name, 0.0) + value.mean() * share
    if look or run.probes:
        check_up(run)
    # 2. Decide once, at one place, on every rank: one all-reduce of the flags. Gradients need none, DDP made
    #    them equal.
    bad = guard.decide()
    # 3. Unscale, measure, clip, skip and AdamW in one pass. Clipping before the verdict would turn one NaN
    #    into a model of NaNs; clipping before unscaling would compare the norm with 65536 times the limit.
    result = optimizer.step(grad_scale=scaler.scale_tensor, skip=bad, measure=look)
    # 4. Rejected: BatchNorm's statistics go back too. Accepted: the average moves. The schedule counts accepted
    #    updates only, the loss scale learns from both.
    guard.close(result.found_inf, **sums, grad_norm=result.grad_norm, lr=result.lr, scale=scaler.scale_tensor,
                updates=optimizer.updates)
    scaler.update(found_inf=result.found_inf)
    if average:
        average.update(optimizer.params, result.found_inf)
    optimizer.zero_grad()


def check_up(run):
    """Between the last backward and the decision: what is too dear for every step. It may ask the device."""
    run.guard.see_state(param=dict(run.net.named_parameters()), optstate=run.optimizer.state)
    if run.world_size > 1:
        verify.tell_replica(run)
    warnings = []
    if run.step == 1:
        warnings = probes.first_step_checks(run.net, None if run.model is run.net else len(run.classes))
    if run.probes:
        run.probes.detach()
        warnings += run.probes.warnings(float(run.scaler.scale_tensor))
    for text in warnings:
        warn(run, text)


# --- The loop

def main(argv=None):
    args = flags.parse(argv, __doc__, MODELS, NAMES)
    if args.replay:
        with refusing(ValueError, OSError):
            return heal.replay(args.replay, MODELS, wrap)
    run = Run(args=args)  # what a failed set-up leaves
    try:
        run = setup(args)
        with checkpoint.StopSignals() as stop, run.checkpoints, run.bar:
            if agreed(run.step == 0 or not run.checkpoints.last_good.exists()):
                save(run)  # there is always a last_good to go back to
            run.model.train()
            run.tick = time.time()
            while run.step < run.total_steps and run.status == "done":
                run.step += 1
                run.injector.begin(run.step, run.optimizer, run.scaler.scale_tensor)
                images, labels = run.injector.batch(*run.stream.at(run.step - 1))
                # After a bad step the next ones are recorded, and their verdicts are read at once.
                hunting = run.step <= run.hunt_until
                if run.guard.lag == hunting:
                    digest(run, run.guard.flush())
                    run.guard.lag = not hunting
                record = heal.record(run, run.step, images, labels) if hunting else None
                digest(run, attempt(run, run.step, images, labels, stop.number, watched=hunting))
                respond(run, record)
                run.trained += args.batch_size
                run.bar.update()
                end_of_step(run)
    except Exception as error:
        run.status, run.code = "failed", 1
        explain(error)
    return finish(run)


def attempt(run, step, images, labels, signal=0, watched=False):
    """One step between open() and verdict(): as a CUDA graph, or kernel by kernel. Returns a verdict or None."""
    due = run.args.verify_every and step % run.args.verify_every == 0
    look = step % CHECK_EVERY == 0 or step == 1 or due
    wrong = verify.twice(run, images, labels) if due else 0
    if run.args.probe_every and step % run.args.probe_every == 0:
        run.probes = probes.Probes(run.net, run.device)
        run.probes.attach()
    run.guard.open(step)
    while True:  # until the step fits into memory
        run.guard.raise_flag("signal", signal)
        run.guard.raise_flag("param", run.doubt)
        if wrong:
            run.guard.tell("unsure", run.rank + wrong)
        try:
            if run.graph and not (watched or run.probes or look):
                run.graph(images, labels)
            else:
                train_step(run, images, labels, look, watched or bool(run.probes))
            break
        except torch.OutOfMemoryError as error:
            heal.make_room(run, error)
    run.probes = None
    # 5. What happened reaches the host one step late: the device never waits for a question.
    verdict = run.guard.verdict()
    if look:
        run.log.tensors(run.step, run.optimizer.statistics(run.net.named_parameters()))
    return verdict


def digest(run, verdict):
    """The host's side of a step: count it, log it, and decide whether to go on. The same on every rank."""
    if verdict is None:
        return
    run.updates, told = int(verdict.stats["updates"]), verdict.told
    if verdict.accepted and verify.differs(told):  # what is rejected is examined, and the ranks go back together
        run.apart = verdict
    if told["micro-batches"]:
        run.accum = max(run.accum, int(told["micro-batches"]))
        warn(run, f"out of memory at step {verdict.step}: from now on {run.accum} micro-batches a step on each rank")
    stats = {**verdict.stats, "updates": run.updates}
    if verdict.accepted:
        run.losses = [run.losses[0] + stats["loss"], run.losses[1] + 1]
        run.lost = heal.suspect(run, stats["loss"], stats["grad_norm"]) or run.lost
    elif "veto" in verdict.reasons:  # see heal.out_of_memory
        run.again.append(verdict.step)
    else:
        reasons = verdict.reasons or ("grad",)  # no flag was up: it was the gradient's norm
        run.log.write(event="skip", step=verdict.step, reasons=reasons, rank=verdict.rank, **stats)
        if run.args.on_nonfinite == "heal":
            run.unexamined += [verdict.step] if verdict.step > run.cured else []
            run.hunt_until = verdict.step + 50
        if run.args.on_nonfinite == "stop" or run.guard.skipped_in_a_row >= run.args.max_skips:
            run.status, run.code = "diverged", 3
    for sentence in verdict.spikes:
        run.log.write(event="spike", step=verdict.step, text=sentence)
    if verdict.signal:
        run.status, run.code = f"stopped by signal {verdict.signal}", 128 + verdict.signal
    if verdict.step % run.args.log_every == 0:
        run.log.write(step=verdict.step, **stats, skipped=run.guard.skipped)
        run.bar.set_postfix({name: f"{value:.4g}" for name, value in stats.items()}, skipped=run.guard.skipped)


def respond(run, record=None):
    """Examine each rejected step, and turn back where the run is lost with finite numbers. `record`: of this step."""
    while run.again:
        step = run.again.pop(0)
        run.injector.begin(step, state=False)
        digest(run, attempt(run, step, *run.injector.batch(*run.stream.at(step - 1))))
        digest(run, run.guard.flush())
    if run.apart and run.status == "done":
        tell(run, verify.settle(run))
    run.apart = None
    while run.unexamined and run.status == "done":
        step = run.unexamined.pop(0)
        tell(run, heal.treat(run, step, record if record and record.step == step else None))
    if run.lost and run.status == "done":
        tell(run, heal.turn_back(run, run.lost))
    run.lost = ""


def tell(run, cure):
    """What healing found and did, in the log and on the screen. A loss scale that finds its place is no news."""
    if run.graph:
        run.graph.drop()  # a cure may have exchanged what the graph holds
    if not cure.action:
        return
    found = cure.report
    run.log.write(event="cure", step=run.step, of_step=found.step, verdict=found.verdict, rank=found.rank,
                  module=found.module, op=found.op, samples=found.indices, action=cure.action)
    say(run, f"{found}\n  -> {cure.action}")


def end_of_step(run):
    """Validate where an epoch ends, save where it is time. Whatever ends the run passes here too."""
    at_the_end = run.step == run.total_steps
    end_of_epoch = at_the_end or run.step % run.epoch_steps == 0
    time_to_save = at_the_end or run.step % (run.args.ckpt_every or run.epoch_steps) == 0
    if end_of_epoch or time_to_save or run.status != "done":
        digest(run, run.guard.flush())
        respond(run)
        if at_the_end and run.status == "done" and heal.suspicious(run):
            run.status, run.code = "diverged", 3
    stopped = run.status.startswith("stopped")
    if end_of_epoch and (run.status == "done" or stopped):
        run.busy += time.time() - run.tick
        if warning := validation.validate(run):
            warn(run, warning)
        mean = run.losses[0] / run.losses[1] if run.losses[1] else math.nan
        run.log.write(step=run.step, epoch=run.step / run.epoch_steps, train_loss=mean, **run.scores)
        say(run, f"epoch {run.step / run.epoch_steps:.2f}  step {run.step}  loss {mean:.4f}  "
            + "".join(f"{name} {value:.4f}  " for name, value in run.scores.items() if name.startswith("val_"))
            + f"skipped {run.guard.skipped}  {run.trained / run.busy:.0f} images/s")
        run.losses, run.tick = [0.0, 0], time.time()
        if run.lost and at_the_end:
            run.status, run.code = "diverged", 3
            warn(run, run.lost)
        respond(run)
    if (time_to_save and run.status == "done") or stopped:
        save(run)
    run.checkpoints.poll()


def save(run):
    """Every rank brings its RNG; rank 0 writes. A state that holds a non-finite number is refused, not written."""
    share_buffers(run.net)
    rng = [checkpoint.rng_state(run.device)] * run.world_size
    if run.world_size > 1:
        dist.all_gather_object(rng, rng[0])
    run.doubt = False
    if run.rank == 0:
        state = {
            "healer": heal.state_dict(run), "model": run.net.state_dict(), "optimizer": run.optimizer.state_dict(),
            "guard": run.guard.state_dict(), "average": run.average and run.average.state_dict(),
            "validator": {"best": run.best}, "rng": rng, "facts": run.facts, "losses": run.losses,
            "scores": run.scores, "figures": run.log.figures,
        }
        good = run.guard.skipped_in_a_row == 0 and not heal.suspicious(run)
        if bad := run.checkpoints.save(state, run.step, good=good):
            run.doubt = True  # the next step will be rejected on every rank, and examined
            run.log.write(event="save refused", step=run.step, tensors=bad)


def say(run, text):
    if run.rank == 0:
        tqdm.write(text)
        sys.stdout.flush()


def warn(run, text):
    run.log.write(event="warning", step=run.step, text=text)
    say(run, f"step {run.step}: {text}")


def explain(error):
    """On standard error: a sentence where it is known what to do, the whole traceback where it may be a bug."""
    advice = {torch.OutOfMemoryError: "try: the same command with twice the --accum-steps, and --resume auto",
              graphs.NoGraph: "try: --no-cuda-graph", checkpoint.CheckpointError: ""}
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a full disk
        print(f"train.py: {error}", file=sys.stderr)
    elif type(error) in advice:
        print(f"train.py: {error}\n  {advice[type(error)]}".rstrip(), file=sys.stderr)
    else:
        traceback.print_exception(error)


def finish(run):
    """The summary, on standard output as the last line, however the run has ended. Returns the exit code."""
    args, failed = run.args, run.status == "failed"
    run.busy += time.time() - run.tick if run.tick else 0.0
    summary = {
        "status": run.status, "model": args.model, "dataset": run.dataset or args.dataset,
        "precision": run.policy.name if run.policy else args.precision, "steps": run.step,
        # after a failure the device may answer no question
        "updates": run.updates if failed else int(run.optimizer.updates),
        "skipped": run.guard.skipped if run.guard else 0, "healed": run.healed,
        "quarantined": sorted(run.stream.quarantine) if run.stream else [],
        **{name: round(value, 4) for name, value in run.scores.items() if name.startswith("val_")},
        "seconds": round(time.time() - run.began, 1), "images_per_second": round(run.trained / max(run.busy, 1e-9), 1),
        "peak_memory_mb": report.peak_memory_mb(run.device.type == "cuda"),
    }
    if run.log:
        try:
            run.log.finish(summary)
        except Exception as error:  # a full disk, say: the line below is printed all the same
            explain(error)
    if speaks():
        print(json.dumps(summary))
    if dist.is_initialized() and not failed:
        dist.barrier()  # torchrun ends all processes as soon as one leaves with a code: rank 0 has to have printed
        dist.destroy_process_group()
    return run.code


# --- Everything decided before the first step

def setup(args):
    """The record of a run that is ready for its first step. What cannot work is refused before a file is written."""
    run = Run(args=args)
    local_rank = prepare.process(run)
    prepare.find(run)
    left_out = prepare.data(run, local_rank)
    prepare.network(run)
    torch.manual_seed(args.seed + run.rank)  # from here on ranks draw different noise
    why, warmup = prepare.length(run)
    prepare.training(run, warmup)
    alone_on_a_gpu = run.device.type == "cuda" and run.world_size == 1
    if args.cuda_graph and alone_on_a_gpu and not (args.inject or args.detect_anomaly):
        run.graph = graphs.StepGraph(functools.partial(train_step, run))
    note = prepare.folder(run)
    for line in prepare.card(run, why, warmup, note):
        say(run, line)
    for text in (*left_out, *run.policy.warnings):
        warn(run, text)
    run.found = None  # its tensors have been copied
    run.bar = tqdm(total=run.total_steps, initial=run.step, disable=quiet(), unit="step")
    return run


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if "RANK" in os.environ:
        os._exit(code)  # gloo's threads sometimes abort a process that has ended well
    sys.exit(code)
