"""
Heal: what to do about a bad step that keeps coming back. The ladder of responses, each rung bounded.

A guard that only skips is a guard that stalls: when one module overflows in fp16 at every step, every step is skipped,
the loss scale falls to its floor, and the run stands still without an error. So every rejected step is examined
(autopsy.py). What is done depends on the verdict:

    precision          finite in fp32           that module runs in fp32 from now on. If there is no such module, or it
                                                is in fp32 already, the run goes fp16 -> bf16 (native only) -> fp32
    data               a bad input or label     the samples are named and never drawn again; over 1 % of the steps:
                                                exit 4
    weights            bad before the step      back to last_good, past these batches
    divergence         bad in fp32 too          back to last_good, past these batches, with half the learning rate
    compiler           finite in eager mode     the run goes on in eager mode
    calibration        finite at loss scale 1   nothing: the loss scale falls by itself
    not reproducible   finite the second time   passed over; the fifth time: exit 5, suspect the hardware

The host learns of a rejection one step late. The step is then put together again from its number (batches are a pure
function of the step) and examined with the weights of one update later: enough for data, weights and precision. The
next 50 steps are recorded before they run, so that a fault that comes back is examined exactly as it was: only then
are "divergence" and "not reproducible" believed.

A run can also be lost with finite numbers only: see suspect(). And memory can end at any step, on any rank, after a
cure too (fp32 takes twice the memory of half): see make_room().

Every rank holds the same report (autopsy.agree) and takes the same turn. Like train.py this file is wiring: it knows
the core files, and only train.py and prepare.py know it. `run` is train.py's record of the run, which these functions
read and change: policy, scaler, accum, status, code, healed, cures, hunt_until, cured, trend, doubt.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amp_policy
import autopsy
import checkpoint
from fp32 import fp32_eval, keep_fp32, pinned
from ranks import parallel
from rescue import inject


class Cure(NamedTuple):
    """What was found about a step, and what was done."""

    report: autopsy.Report
    action: str  # a sentence; "": nothing was done, the loss scale is finding its place


# --- The step once more

def record(run: Any, step: int, images: Tensor, labels: Tensor) -> autopsy.StepRecord:
    """What examine() will need of a step: RNG and buffers as they are now, and its micro-batches."""
    kept = autopsy.StepRecord(step, run.net, rank=run.rank)
    batch = images, labels, run.stream.indices(step - 1)
    for x, y, indices in zip(*(t.chunk(run.accum) for t in batch), strict=True):
        kept.keep(x, y, indices=indices.tolist())
    return kept


def recall(run: Any, step: int) -> autopsy.StepRecord:
    """The record of a step that is over: its batches again, with the weights, buffers and RNG of now."""
    run.injector.begin(step, state=False)  # a planted fault is planted again, but for those of the weights
    return record(run, step, *run.injector.batch(*run.stream.at(step - 1)))


def rerun(run: Any, kept: autopsy.StepRecord, model: nn.Module | None = None) -> Callable:
    """For autopsy.examine: forward and backward of one recorded micro-batch, at loss scale 1, without DDP.

    model: run.model where nothing is said. Needs run.net, run.policy and run.injector too.
    """

    def run_step(batch: tuple, fp32: bool) -> tuple[Tensor, dict]:
        run.injector.repeat(next(i for i, micro_batch in enumerate(kept.batches) if micro_batch is batch))
        loss, gradients, _ = in_pieces(run, batch, fp32, model)
        return loss, gradients

    return run_step


def in_pieces(run: Any, batch: tuple, fp32: bool = False, model: Any = None) -> tuple[Tensor, dict, int]:
    """Forward and backward of a micro-batch, whole or in 2, 4, ... pieces, as many as it takes to fit into memory.

    Returns loss, gradients by name, number of pieces. What just fits into memory in training may not fit in fp32.
    """
    pieces, size, model = 1, len(batch[0]), model or run.model
    while True:
        try:
            total = 0.0
            with fp32_eval(run.net) if fp32 else nullcontext():
                for x, y in zip(*(t.chunk(pieces) for t in batch), strict=True):
                    with nullcontext() if fp32 else run.policy.autocast():
                        loss, _ = model(x, y)
                    loss = loss * (len(x) / size)
                    loss.backward()  # outside of autocast, which would cast an island's gradients to half
                    total = total + loss.detach()
                # inside: fp32_eval computes on fp32 copies of half parameters, and these hold the gradients
                return total, {name: p.grad for name, p in run.net.named_parameters()}, pieces
        except torch.OutOfMemoryError:
            if pieces >= size:
                raise
            pieces *= 2
            run.net.zero_grad(set_to_none=True)


# --- The turn

def treat(run: Any, step: int, kept: autopsy.StepRecord | None = None) -> Cure:
    """Examine a rejected step and do what helps. `kept`: its record, if it was made before the step."""
    run.doubt = False  # whatever made a save refuse the state is examined now
    exact = kept is not None
    kept = kept or recall(run, step)
    report = examine(run, kept)
    if calibrates(run, report):
        return Cure(report, "")
    if report.verdict in ("divergence", "not reproducible") and not exact:
        return Cure(report, "passed over: one step alone; if one of the next 50 is like it, this is acted on")
    action = respond(run, report)
    if report.verdict != "data":
        run.cured = run.step  # the steps up to here ran before the cure: examining them would find the same again
        run.unexamined.clear()
    return Cure(report, action)


def examine(run: Any, kept: autopsy.StepRecord) -> autopsy.Report:
    """What was wrong with the recorded step. The first time, the guilty rank writes a capsule of the step too."""
    facts = {"precision": run.policy.name, "num_classes": run.guard.num_classes}
    compiled = None
    if run.compiled is not run.ddp:  # the same code without DDP; it is compiled anew
        compiled = rerun(run, kept, torch.compile(run.model))
    report = autopsy.agree(autopsy.examine(
        rerun(run, kept), kept, run.net, state=dict(enumerate(run.optimizer.state.values())),
        scale=float(run.scaler.scale_tensor), advice="flags", run_compiled=compiled, **facts,
    ))
    if report.rank == run.rank and not calibrates(run, report) and not any(run.folder.glob("bad_step_*")):
        save_capsule(
            run.folder / f"bad_step_{report.step}_rank{run.rank}.pt", kept, report, **facts,
            pinned=pinned(run.net), optimizer=run.optimizer.state_dict(), model_name=run.args.model,
            drop_path=run.args.drop_path, inject=run.args.inject, class_names=run.classes,
            image_size=kept.batches[0][0].shape[-1],
        )
    return report


def calibrates(run: Any, report: autopsy.Report) -> bool:
    """Whether the step was bad only because of the loss scale, and the scale can fall."""
    scaler = run.scaler
    harmless = report.verdict in ("calibration", "not reproducible")
    return harmless and scaler.is_enabled() and report.scale > scaler.floor


def respond(run: Any, report: autopsy.Report) -> str:
    """One rung of the ladder. Returns what was done."""
    verdict, (kind, name) = report.verdict, report.cure
    run.cures[verdict] += 1
    if verdict in ("not reproducible", "calibration"):  # the loss scale is at its floor
        if run.cures[verdict] >= 5:
            run.status, run.code = "suspected hardware", 5
        return "passed over"
    if verdict == "error":
        return "passed over: the step cannot be run again"
    if verdict == "data":
        if run.cures[verdict] > max(3, 0.01 * report.step):
            run.status, run.code = "bad data", 4
        run.stream.leave_out(report.indices)
        return "passed over" + (", these samples are never drawn again" if report.indices else "")
    if sum(run.cures[v] for v in ("precision", "weights", "divergence", "compiler")) > run.args.max_cures:
        run.status, run.code = "diverged", 3
        return f"given up after {run.args.max_cures} cures"
    if verdict == "compiler":
        run.compiled = run.ddp
        run.healed.append("eager mode")
        return "the run goes on in eager mode: --compile is given up"
    keep = kind == "module, result in fp32"
    if verdict == "precision" and kind.startswith("module") and name and name not in pinned(run.net, keep_output=keep):
        keep_fp32(run.net, [name], keep_output=keep)
        run.guard.watch(run.net)  # pinning may have exchanged buffers
        run.healed.append(name)
        return f"{name} is kept in fp32 from now on" + (", its result too" if keep else "")
    if verdict == "precision" and run.policy.dtype in (torch.float16, torch.bfloat16):
        return demote(run)
    return rewind(run, 0.5 if verdict == "divergence" else 1.0)


def demote(run: Any) -> str:
    """fp16 -> bf16 where the chip has it -> fp32."""
    native = amp_policy.capabilities(run.device).native_bf16
    adopt(run, "bf16" if run.policy.dtype is torch.float16 and native else "fp32")
    run.healed.append(run.policy.name)
    return f"no single module is left to keep in fp32: the run goes on in {run.policy.name}"


def adopt(run: Any, precision: str) -> None:
    """Another policy, with a loss scale of its own. Half weights become fp32: what their masters hold."""
    policy = amp_policy.choose_policy(precision, amp_policy.capabilities(run.device), None, None)
    if run.policy.param_dtype is not policy.param_dtype:
        run.optimizer.widen()
        run.ddp = parallel(run.model, run.device)  # the hooks of the old one hang on half weights
        run.compiled = torch.compile(run.ddp) if run.compiled is not run.ddp and run.args.compile else run.ddp
    run.policy = policy
    run.scaler = amp_policy.LossScaler(run.device.type, enabled=run.policy.scales)


def out_of_memory(run: Any) -> None:
    """This rank's memory ended while DDP averaged: no rank uses this average, and all take the step once more."""
    if 2 * run.accum > run.args.batch_size // run.world_size:
        raise torch.OutOfMemoryError("not even one image a micro-batch fits into memory")
    run.guard.raise_flag("veto")
    run.guard.tell("micro-batches", 2 * run.accum)


def make_room(run: Any, error: torch.OutOfMemoryError) -> None:
    """This rank's memory ended before any collective of the step. Half the micro-batch, twice as many of them: the
    update stays the same within rounding. This rank begins the step again at once; the others follow at the verdict.

    Raises the error where no room can be made: after the decision, with one image a micro-batch, and while a CUDA graph
    was recorded (CUDA's random numbers do not outlive that).
    """
    recording = run.graph and run.graph.graph is None and run.graph.calls > run.graph.warm_up
    if run.guard.decided or recording or 2 * run.accum > run.args.batch_size // run.world_size:
        raise error
    run.accum *= 2
    run.optimizer.zero_grad()
    if run.graph:
        run.graph.drop()
    run.guard.again()
    run.guard.tell("micro-batches", run.accum)


def rewind(run: Any, factor: float) -> str:
    """Weights, moments and average of last_good; the data goes on where it is."""
    run.checkpoints.wait()
    if dist.is_initialized():
        dist.barrier()
    state = checkpoint.load(run.checkpoints.last_good)
    factor *= float(run.optimizer.lr_factor)
    run.net.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if run.average:
        run.average.load_state_dict(state["average"])
    run.optimizer.lr_factor.fill_(factor)
    slower = "" if factor == 1 else f", learning rate x {factor:g}"
    return f"back to the weights of step {state['step']}{slower}"


# --- Lost with finite numbers

PATIENCE = 20  # steps in a row that a suspicion takes; one spike, or ten, that recovers is left alone


def suspect(run: Any, loss: float, grad_norm: float) -> str:
    """Watch an accepted step's numbers: what looks lost and has been for long, or "". The host has them already.

    Lost is a loss above twice its start, or above four times its recent past and a tenth of its start; and a gradient
    that is dead, its norm below 1e-12. Start is the lowest of the first 10 losses.
    """
    trend = run.trend
    trend["seen"] += 1
    if trend["seen"] <= 10:
        trend["start"] = min(trend["start"], loss)
        trend["usual"] = loss
        return ""
    far_above = loss > 2 * trend["start"] > 0 or loss > max(4 * trend["usual"], 0.1 * trend["start"]) > 0
    if not far_above:
        trend["usual"] += 0.05 * (loss - trend["usual"])
    trend["high"] = trend["high"] + 1 if far_above else 0
    trend["dead"] = trend["dead"] + 1 if grad_norm < 1e-12 else 0
    if trend["dead"] >= PATIENCE:
        return f"the gradient has been dead for {trend['dead']} steps (norm {grad_norm:.3g})"
    if trend["high"] >= PATIENCE:
        return (f"the loss has been far above its past for {trend['high']} steps: {loss:.4g}, "
                f"before that {trend['usual']:.4g}, at the start {trend['start']:.4g}")
    return ""


def suspicious(run: Any) -> bool:
    """Whether a suspicion is open: then last_good is not moved, and a run that ends now does not end well.

    After a divergence one step is enough: the run may end before the next suspicion has lasted.
    """
    steps = max(run.trend["high"], run.trend["dead"])
    return steps >= (1 if run.cures["divergence"] else PATIENCE // 2)


def turn_back(run: Any, symptom: str) -> Cure:
    """The response to a suspicion that has lasted: back to last_good with half the learning rate, bounded."""
    run.trend["high"] = run.trend["dead"] = 0
    report = autopsy.Report(verdict="divergence", step=run.step, rank=run.rank, precision=run.policy.name,
                            symptom=symptom)
    return Cure(report, respond(run, report))


# --- What of it a checkpoint carries

def state_dict(run: Any) -> dict:
    return {"healed": list(run.healed), "counts": dict(run.cures), "hunt_until": run.hunt_until,
            "pinned": pinned(run.net), "keep_output": pinned(run.net, keep_output=True),
            "policy": run.policy.name, "asked": run.asked,
            "accum": run.accum, "scaler": run.scaler.state_dict(), "trend": dict(run.trend),
            "quarantine": sorted(run.stream.quarantine)}


def load_state_dict(run: Any, state: dict) -> None:
    """Before the network's: pinned modules have fp32 weights."""
    run.healed, run.cures = list(state["healed"]), Counter(state["counts"])
    run.hunt_until, run.accum = state["hunt_until"], max(run.accum, state["accum"])
    run.trend |= state.get("trend", {})
    run.stream.leave_out(state.get("quarantine", ()))
    keep_fp32(run.net, state["pinned"])
    keep_fp32(run.net, state.get("keep_output", ()), keep_output=True)
    if "eager mode" in run.healed:
        run.compiled = run.ddp
    run.guard.watch(run.net)  # pinning may have exchanged buffers
    if state["asked"] == run.asked != state["policy"]:
        adopt(run, state["policy"])
    run.scaler.load_state_dict(state["scaler"])


# --- The step on another machine

def save_capsule(path: str | os.PathLike, record: autopsy.StepRecord, report: autopsy.Report, **more: Any) -> None:
    """The step on disk: weights, buffers, RNG, micro-batches, report, and `more` (plain values and tensors: arguments,
    optimizer state). Written whole or not at all. load_capsule reads it without running any code."""
    capsule = {"format": 1, "step": record.step, "rank": record.rank, "model": record.net.state_dict(),
               "buffers": record.buffers, "rng": record.rng, "batches": record.batches, "indices": record.indices,
               "report": asdict(report), **more}
    torch.save(tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, capsule), f"{path}.part")
    os.replace(f"{path}.part", path)


def load_capsule(path: str | os.PathLike) -> dict[str, Any]:
    """Tensors on the CPU. ValueError, one sentence, if the file is no capsule."""
    try:
        capsule = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch's own text advises weights_only=False
        raise ValueError(f"{path} is no capsule of a bad step, or it is damaged; nothing in it was run") from error
    if not isinstance(capsule, dict) or capsule.get("format") != 1 or "batches" not in capsule:
        raise ValueError(f"{path} is no capsule of a bad step")
    return capsule


def unpack(capsule: Mapping[str, Any], net: nn.Module) -> autopsy.StepRecord:
    """Weights into `net` (same architecture, any device); the record, ready for examine(). A CUDA generator's state
    means nothing on a CPU: there, dropout draws other masks."""
    net.load_state_dict(capsule["model"])
    kept = autopsy.StepRecord(capsule["step"], net, rank=capsule["rank"])
    kept.rng, kept.indices = capsule["rng"], capsule["indices"]
    stored = capsule["buffers"], capsule["batches"]
    kept.buffers, kept.batches = tree_map(lambda v: v.to(kept.device) if isinstance(v, Tensor) else v, stored)
    return kept


def replay(path: Any, models: dict, wrap: Callable) -> int:
    """Examine the step in a capsule again, on the CPU, and print both verdicts; 0 if they agree.

    models: name -> (build, recipe). wrap: gives a network its loss, called with the recipe's label_smoothing.
    """
    capsule = load_capsule(path)
    build, recipe = models[capsule["model_name"]]
    net = build(capsule["class_names"], capsule["image_size"])
    policy = amp_policy.choose_policy(capsule["precision"], amp_policy.capabilities("cpu"), None, None)
    if capsule.get("drop_path"):
        net.set_drop_path(capsule["drop_path"])
    keep_fp32(net, capsule["pinned"])
    net = policy.prepare(net)
    kept = unpack(capsule, net)
    injector = inject.Injector(net, inject.parse_inject(capsule["inject"]), capsule["rank"])
    injector.begin(kept.step, state=False)
    model = wrap(net, recipe["label_smoothing"])
    injector.attach(model)
    run = SimpleNamespace(net=net, model=model, policy=policy, injector=injector)
    report = autopsy.examine(
        rerun(run, kept), kept, net, state=capsule["optimizer"], num_classes=capsule["num_classes"],
        precision=policy.name, advice="flags",
    )
    recorded = capsule["report"]["verdict"]
    print(f"{report}\nrecorded verdict: {recorded}, replayed on the CPU: {report.verdict}")
    return int(report.verdict != recorded)
