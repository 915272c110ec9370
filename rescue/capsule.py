"""
Capsule: a bad step in one file, to be examined again on any machine.

A step that was bad on the GPU of a night is gone in the morning. So the first time that a step is
examined, the guilty rank writes it down: weights, moments, buffers, random numbers, micro-batches,
and the report. `python train.py --replay FILE` puts the step together again, on a CPU too, examines
it, and prints both verdicts. No code in the file is run. This file is wiring: heal.py calls it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amp_policy
import autopsy
from fp32 import keep_fp32, pinned
from record import Run
from rescue import inject

NEEDED = {
    "step": int, "rank": int, "model": dict, "buffers": (dict, list), "rng": (dict, list, tuple),
    "batches": list, "indices": list, "report": dict, "optimizers": list, "model_name": str,
    "class_names": list, "image_size": int, "precision": str, "inject": str, "pinned": list,
}


def about(run: Run, kept: autopsy.StepRecord) -> dict[str, Any]:
    """What it takes to build the network of this run again."""
    return {
        "model_name": run.args.model, "class_names": run.data.classes,
        "image_size": kept.batches[0][0].shape[-1], "drop_path": run.args.drop_path,
        "pinned": pinned(run.net), "inject": run.args.inject,
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
    }


def save(path: Path, kept: autopsy.StepRecord, report: autopsy.Report, more: dict) -> None:
    """The step on disk, whole or not at all. `more`: plain values and tensors."""
    content = {
        "format": 2, "step": kept.step, "rank": kept.rank, "model": kept.net.state_dict(),
        "buffers": kept.buffers, "rng": kept.rng, "batches": kept.batches,
        "indices": kept.indices, "report": asdict(report), **more,
    }
    on_cpu = tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, content)
    torch.save(on_cpu, f"{path}.part")
    os.replace(f"{path}.part", path)


def load(path: str | os.PathLike) -> dict[str, Any]:
    """Tensors on the CPU. ValueError, one sentence, if the file is no capsule."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch's own text advises weights_only=False
        raise ValueError(f"{path} is no capsule of a bad step, or it is damaged; nothing in it was "
                         "run") from error
    if not isinstance(content, dict) or content.get("format") != 2:
        raise ValueError(f"{path} is no capsule of a bad step")
    for name, kind in NEEDED.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{path} is no whole capsule: {name} is missing or of another kind")
    return content


def unpack(content: dict[str, Any], net: nn.Module) -> autopsy.StepRecord:
    """Weights into `net` (same architecture, any device); the record, ready for examine(). A CUDA
    generator's state means nothing on a CPU: there, dropout draws other masks."""
    net.load_state_dict(content["model"])
    kept = autopsy.StepRecord(content["step"], net, rank=content["rank"])
    kept.rng, kept.indices = content["rng"], content["indices"]
    stored = content["buffers"], content["batches"]
    here = tree_map(lambda v: v.to(kept.device) if isinstance(v, Tensor) else v, stored)
    kept.buffers, kept.batches = here
    return kept


def replay(path: str | os.PathLike, models: dict, wrap: Callable, rerun: Callable) -> int:
    """Examine the step in a capsule again, on the CPU, and print both verdicts; 0 if they agree.

    models: name -> (build, recipe). wrap: gives a network its loss. rerun: heal.rerun.
    ValueError: this is no capsule, or not of these models.
    """
    content = load(path)
    if content["model_name"] not in models:
        raise ValueError(f"{path} is of the model {content['model_name']}, which is not here")
    build, recipe = models[content["model_name"]]
    net = build(content["class_names"], content["image_size"])
    caps = amp_policy.capabilities("cpu")
    policy = amp_policy.choose_policy(content["precision"], caps, None, None)
    if content.get("drop_path"):
        net.set_drop_path(content["drop_path"])
    keep_fp32(net, content["pinned"])
    net = policy.prepare(net)
    try:
        kept = unpack(content, net)
    except (RuntimeError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} does not fit this {content['model_name']}: {why}") from error
    faults = inject.parse_inject(content["inject"])
    injector = inject.Injector(net, faults, content["rank"], scales=policy.scales)
    injector.begin(kept.step, state=False)
    regression = content.get("num_classes") is None
    model = wrap(net, recipe["label_smoothing"], regression)
    injector.attach(model)
    run = Run(net=net, model=model, policy=policy, injector=injector)
    report = autopsy.examine(
        rerun(run, kept), kept, net, state=dict(enumerate(content["optimizers"])),
        num_classes=content.get("num_classes"), precision=policy.name, advice="flags",
    )
    recorded = content["report"]["verdict"]
    print(f"{report}\nrecorded verdict: {recorded}, replayed on the CPU: {report.verdict}")
    return int(report.verdict != recorded)
