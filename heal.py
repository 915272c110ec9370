"""
Heal: what to do about a bad step that keeps coming back. The ladder of responses, each rung bounded.

A guard that only skips is a guard that stalls: when one module overflows in fp16 at every step, every step is skipped,
the loss scale falls to its floor, and the run stands still without an error. So after a bad step the next bad one is
examined (autopsy.py), and what is done depends on what it was:

    precision          finite in fp32           that module runs in fp32 from now on; if there is no such module, or it
                                                is in fp32 already: the run goes fp16 -> bf16 (native only) -> fp32,
                                                in smaller micro-batches where the memory asks for them
    data               a bad input or label     the samples are named and passed over; over 1 % of the steps: exit 4
    weights            bad before the step      back to last_good, past these batches
    divergence         bad in fp32 too          the same, with half the learning rate
    not reproducible   finite the second time   passed over; the fifth time: exit 5, suspect the hardware

Finite at loss scale 1 and bad at 65536 is calibration, not a fault: nothing is done, the scale falls by itself.

Every rank holds the same report (autopsy.agree) and takes the same turn. Like train.py this file is wiring: it knows
the core files, and only train.py knows it. It is apart because the loop should be readable at one sitting.
"""

import collections
import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amp_policy
import autopsy
import checkpoint
import guards
import inject


def rerun(model: nn.Module, net: nn.Module, policy: amp_policy.Policy, injector: inject.Injector,
          evidence: autopsy.StepRecord):
    """For autopsy.examine: forward and backward of one recorded micro-batch on the bare model, at loss scale 1.

    What training just fits into memory, a look at it in fp32 may not: then the micro-batch is taken in pieces.
    """

    def run_in(pieces, batch, fp32):
        micro = next(i for i, kept in enumerate(evidence.batches) if kept is batch)
        total = 0.0
        with amp_policy.fp32_eval(net) if fp32 else contextlib.nullcontext():
            for x, y in zip(*(t.chunk(pieces) for t in batch), strict=True):
                with contextlib.nullcontext() if fp32 else policy.autocast():
                    loss, _ = model(x, y)
                loss = injector.loss(loss, micro) * (len(x) / len(batch[0]))
                loss.backward()  # outside of autocast, which would cast an fp32 island's gradients to half
                total = total + loss.detach()
            return total, {name: p.grad for name, p in net.named_parameters()}

    def run_step(batch, fp32):
        pieces = 1
        while True:
            try:
                return run_in(pieces, batch, fp32)
            except torch.OutOfMemoryError:
                if pieces >= len(batch[0]):
                    raise
                pieces *= 2
                net.zero_grad(set_to_none=True)

    return run_step


class Cure(NamedTuple):
    """What healing did about a step."""

    report: autopsy.Report
    action: str  # a sentence; "" = nothing, the loss scale is finding its place
    status: str = "done"  # or why the run ends
    code: int = 0


class Healer:
    """Examines bad steps and applies the cure.

    `policy`, `accum` (micro-batches an update) and `scaler` are those in force: a cure may change them, and a resumed
    run goes on with them. `parts`: what train.py trains: model, optimizer, average.
    """

    def __init__(self, model: nn.Module, parts: dict, policy: amp_policy.Policy, scaler: amp_policy.LossScaler,
                 guard: guards.Guard, injector: inject.Injector, checkpoints: checkpoint.Checkpoints, *, device,
                 rank: int, accum: int, max_cures: int):
        self.model, self.parts, self.net, self.optimizer = model, parts, parts["model"], parts["optimizer"]
        self.policy, self.scaler, self.accum, self.asked = policy, scaler, accum, policy.name
        self.guard, self.injector, self.checkpoints = guard, injector, checkpoints
        self.device, self.rank, self.max_cures = device, rank, max_cures
        self.healed: list[str] = []
        self.counts: collections.Counter = collections.Counter()
        self.hunt_until = 0  # the last step to record, after a bad one

    def state_dict(self) -> dict:
        return {"healed": list(self.healed), "counts": dict(self.counts), "hunt_until": self.hunt_until,
                "pinned": amp_policy.pinned(self.net), "policy": self.policy.name, "asked": self.asked,
                "accum": self.accum, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Before the network's: pinned modules have fp32 weights."""
        self.healed, self.counts = list(state["healed"]), collections.Counter(state["counts"])
        self.hunt_until, self.accum = state["hunt_until"], max(self.accum, state["accum"])
        amp_policy.keep_fp32(self.net, state["pinned"])
        self.guard.watch(self.net)  # pinning may have exchanged buffers
        if state["asked"] == self.asked != state["policy"]:
            self.adopt(state["policy"])
        self.scaler.load_state_dict(state["scaler"])

    def adopt(self, precision: str) -> None:
        self.policy = amp_policy.choose_policy(precision, amp_policy.capabilities(self.device))
        self.scaler = amp_policy.LossScaler(self.device.type, enabled=self.policy.scales)

    def record(self, step: int, *batch: torch.Tensor) -> autopsy.StepRecord:
        """What examine() will need. `batch`: images, labels and indices, of all micro-batches."""
        evidence = autopsy.StepRecord(step, self.net, rank=self.rank)
        for x, y, indices in zip(*(t.chunk(self.accum) for t in batch), strict=True):
            evidence.keep(x, y, indices=indices.tolist())
        return evidence

    def treat(self, evidence: autopsy.StepRecord, **about) -> Cure:
        """Examine a rejected step and do what helps. `about`: what a capsule of it has to tell about the run."""
        report = self.examine(evidence, **about)
        if self.calibrates(report):
            return Cure(report, "")
        cure = Cure(report, *self.cure(report))
        if report.verdict == "precision":  # fp32 takes more memory than half
            pieces = self.fit(evidence)
            self.accum *= pieces
            more = f", in micro-batches {pieces} times smaller" * (pieces > 1)
            cure = cure._replace(action=cure.action + more)
        return cure

    def examine(self, evidence: autopsy.StepRecord, **about) -> autopsy.Report:
        """What was wrong with the recorded step; the first time on the guilty rank, a capsule of it is written too."""
        facts = {"precision": self.policy.name, "num_classes": self.guard.num_classes}
        report = autopsy.agree(autopsy.examine(
            rerun(self.model, self.net, self.policy, self.injector, evidence), evidence, self.net,
            state=dict(enumerate(self.optimizer.state.values())), scale=float(self.scaler.scale_tensor), advice="flags",
            **facts,
        ))
        folder = Path(self.checkpoints.last).parent
        if report.rank == self.rank and not self.calibrates(report) and not any(folder.glob("bad_step_*")):
            save_capsule(
                folder / f"bad_step_{report.step}_rank{self.rank}.pt", evidence, report, **facts,
                pinned=amp_policy.pinned(self.net), optimizer=self.optimizer.state_dict(), **about,
            )
        return report

    def calibrates(self, report: autopsy.Report) -> bool:
        scaler = self.scaler
        return report.verdict == "calibration" and scaler.is_enabled() and report.scale > scaler.floor

    def cure(self, report: autopsy.Report) -> tuple[str, str, int]:
        """(what was done, status, exit code)."""
        verdict = report.verdict if report.verdict != "calibration" else "not reproducible"  # the scale is at its floor
        kind, module = report.cure
        if verdict == "error":
            raise RuntimeError(str(report))
        self.counts[verdict] += 1
        if verdict == "not reproducible":
            return "passed over", *(("suspected hardware", 5) if self.counts[verdict] >= 5 else ("done", 0))
        if verdict == "data":
            many = self.counts[verdict] > max(3, 0.01 * report.step)
            return "passed over", *(("bad data", 4) if many else ("done", 0))
        if self.counts.total() - self.counts["data"] > self.max_cures:
            return f"given up after {self.max_cures} cures", "diverged", 3
        if verdict == "precision" and kind.startswith("module") and module not in amp_policy.pinned(self.net):
            amp_policy.keep_fp32(self.net, [module])
            self.guard.watch(self.net)
            self.healed.append(module)
            return f"{module} is kept in fp32 from now on", "done", 0
        if verdict == "precision" and self.policy.autocasts:
            return self.demote(), "done", 0
        return self.rewind(0.5 if verdict == "divergence" else 1.0), "done", 0

    def demote(self) -> str:
        """fp16 -> bf16 where the chip has it -> fp32."""
        auto = amp_policy.choose_policy("auto", amp_policy.capabilities(self.device)).name
        self.adopt("bf16" if self.policy.name == "fp16" and auto == "bf16" else "fp32")
        self.healed.append(self.policy.name)
        return f"no single module is left to keep in fp32: the run goes on in {self.policy.name}"

    def fit(self, evidence: autopsy.StepRecord) -> int:
        """Into how many parts to cut a micro-batch (1, 2, 4, ...) so that it fits into memory after a cure.

        nanoVLM's "batch 12 -> 6": fp32 takes twice the memory of half. The batch of an update stays, as there are as
        many more micro-batches. One trial step on the bare model, without a collective: a rank that fails alone leaves
        no other waiting, and all take the largest number. Weights, buffers and RNG stay as they are.
        """
        now, parts = autopsy.rng_states(self.device), 1
        images, labels = evidence.batches[0]
        while True:
            size = -(-len(images) // parts)
            try:
                with self.policy.autocast():
                    loss, _ = self.model(images[:size], labels[:size].clamp(0, self.guard.num_classes - 1))
                loss.backward()
                break
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                parts *= 2
            finally:
                evidence.restore()  # no gradients either
                autopsy.set_rng_states(now, self.device)
        if dist.is_initialized():
            every = torch.tensor(parts, device=self.device)
            dist.all_reduce(every, op=dist.ReduceOp.MAX)
            parts = int(every)
        return parts

    def rewind(self, factor: float) -> str:
        """Weights, moments and average of last_good; the data goes on where it is."""
        self.checkpoints.wait()
        if dist.is_initialized():
            dist.barrier()
        state = checkpoint.load(self.checkpoints.last_good)
        factor *= float(self.optimizer.lr_factor)
        for name in ("model", "optimizer", "average"):
            if self.parts[name]:
                self.parts[name].load_state_dict(state[name])
        self.optimizer.lr_factor.fill_(factor)
        return f"back to the weights of step {state['step']}, learning rate x {factor:g}"


# --- Capsules

def save_capsule(path: str | os.PathLike, record: autopsy.StepRecord, report: autopsy.Report, **more: Any) -> None:
    """The step on disk: weights, buffers, RNG, micro-batches, report, and `more` (plain values and tensors: arguments,
    optimizer state). Written whole or not at all; read by load_capsule without running any code."""
    capsule = {"format": 1, "step": record.step, "rank": record.rank, "model": record.net.state_dict(),
               "buffers": record.buffers, "rng": record.rng, "batches": record.batches, "indices": record.indices,
               "report": asdict(report), **more}
    torch.save(tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, capsule), f"{path}.part")
    os.replace(f"{path}.part", path)


def load_capsule(path: str | os.PathLike) -> dict[str, Any]:
    """ValueError if the file is no capsule. Tensors on the CPU."""
    capsule = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(capsule, dict) or capsule.get("format") != 1 or "batches" not in capsule:
        raise ValueError(f"{path} is no capsule of a bad step")
    return capsule


def unpack(capsule: Mapping[str, Any], net: nn.Module) -> autopsy.StepRecord:
    """Weights into `net` (same architecture, any device); the record, ready for examine(). A CUDA generator's state
    means nothing on a CPU: there, dropout draws other masks."""
    net.load_state_dict(capsule["model"])
    record = autopsy.StepRecord(capsule["step"], net, rank=capsule["rank"])
    record.rng, record.indices = capsule["rng"], capsule["indices"]
    kept = capsule["buffers"], capsule["batches"]
    record.buffers, record.batches = tree_map(lambda v: v.to(record.device) if isinstance(v, Tensor) else v, kept)
    return record


def replay(path: str | Path, models: dict, wrap) -> int:
    """Examine the step in a capsule again, on the CPU, and print both verdicts; 0 if they agree.

    `models`: name -> (build, recipe); `wrap`: gives a network its loss, called with the recipe's label_smoothing.
    """
    capsule = load_capsule(path)
    policy = amp_policy.choose_policy(capsule["precision"], amp_policy.capabilities("cpu"))
    build, recipe = models[capsule["model_name"]]
    net = build(capsule["class_names"], capsule["image_size"])
    if capsule["pinned"]:
        amp_policy.keep_fp32(net, capsule["pinned"])
    net = policy.prepare(net)
    evidence = unpack(capsule, net)
    injector = inject.Injector(net, inject.parse_inject(capsule["inject"]), capsule["rank"])
    injector.begin(evidence.step)
    model = wrap(net, recipe["label_smoothing"])
    report = autopsy.examine(
        rerun(model, net, policy, injector, evidence), evidence, net,
        state=capsule["optimizer"], num_classes=capsule["num_classes"], precision=policy.name, advice="flags",
    )
    recorded = capsule["report"]["verdict"]
    print(f"{report}\nrecorded verdict: {recorded}, replayed on the CPU: {report.verdict}")
    return int(report.verdict != recorded)
