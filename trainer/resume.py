"""
Resume: all of a run that a checkpoint carries, and back again, at another precision level too.

A run that stops may have been healed: modules pinned to fp32, a lower precision given up, samples
left out, a learning rate halved, a verdict not answered yet. A checkpoint without these repeats the
failure that they answer. And a state may be of another level than the run: O2 keeps half weights
with fp32 masters, fp32 keeps fp32 weights. So a checkpoint holds the masters in place of the half
weights: a master, rounded, is its half weight to the bit. schema.py says what a file must hold.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import amp_policy
import checkpoint
import optim
import report
from data import fingerprint
from extras.ema import EMA
from fp32 import keep_fp32, pinned
from ranks import agreed, all_values, must_agree, parallel, refuse, refusing

from . import schema, validation
from .record import EAGER_MODE, Healing, Run, Trend, loss_names

# Arguments by which a run that is resumed is known again.
IDENTIFYING = (
    "model", "batch_size", "accum_steps", "lr", "warmup_updates", "weight_decay", "no_decay",
    "betas", "adam_eps", "amsgrad", "muon", "clip_grad", "drop_path", "cutout", "ema", "seed",
    "val_share", "init", "freeze",
    "class_weights",
)  # fmt: skip


def identity(run: Run) -> dict:
    """What makes a run this run, on all ranks: a checkpoint of another one is refused by it."""
    own = {
        **{name: getattr(run.args, name) for name in IDENTIFYING},
        **fingerprint(*run.data.train),
        **validation.describe_set(run),
        "start": run.start,
        "dataset": run.data.name,
        "num_classes": len(run.data.classes),
        "precision": run.policy.name,
        "world_size": run.world_size,
        "total_steps": run.total_steps,
        "torch": str(torch.__version__),
    }
    must_agree(own)
    return own | {"hardware": amp_policy.capabilities(run.device).name}


def read_checkpoint(run: Run) -> dict | None:
    """Return the checkpoint to resume from, with its "path"; None: a new run."""
    args = run.args
    if args.resume == "none":
        return None
    if args.resume == "auto" and not args.out_dir:
        refuse(2, "--resume auto goes on in a folder: say which with --out-dir")
    with refusing(checkpoint.CheckpointError, OSError):
        if args.resume != "auto":
            try:
                return schema.load(args.resume) | {"path": args.resume}
            except checkpoint.CheckpointError:
                whole = checkpoint.load(args.resume)
                if isinstance(whole, dict) and "step" not in whole:
                    refuse(
                        2,
                        f"{args.resume} holds weights, and no run to go on with: start a new "
                        f"run from them with --init {args.resume}",
                    )
                raise
        newest = checkpoint.Checkpoints(args.out_dir).newest(schema.load)
        return newest and newest[1] | {"path": newest[0]}


def check_folder(run: Run, saved: dict | None) -> None:
    """Before a cure needs it: last_good can be turned back to. And best.pt is there and of no later
    step, or it will be written again."""
    has_best = run.checkpoints.best.exists()
    with refusing(checkpoint.CheckpointError, OSError):
        if run.rank == 0:
            check_last_good(run, saved)
            if run.args.resume != "auto":  # perhaps a file before last.pt
                with contextlib.suppress(checkpoint.CheckpointError):
                    has_best &= schema.load(run.checkpoints.last)["step"] <= saved["step"]
    if not agreed(has_best):
        run.best = None
        run.scores = {}


def check_last_good(run: Run, saved: dict | None) -> None:
    """It is of this run, and restore() takes it. What is damaged, or of a later step, makes room
    for another. The run is at `saved` again afterwards."""
    path = run.checkpoints.last_good
    try:
        good = schema.load(path)
    except checkpoint.CheckpointError:
        if path.exists():
            path.replace(path.with_suffix(".damaged"))
        return
    if good["step"] > saved["step"]:
        path.replace(path.with_suffix(".later"))
        return
    schema.describe_changes(good["identity"], run.identity, path)
    with schema.reading(path):
        restore(run, good)
    restore(run, saved)


def make_folder(run: Run, saved: dict | None) -> Path:
    """--out-dir, or a new folder under runs/. It must not hold another run than `saved`."""
    args = run.args
    if not args.out_dir:
        # Microseconds, because runs may start in the same second. It must not be there yet.
        now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        path = Path("runs", f"{args.model}-{run.data.name}-{run.policy.name}-{now}")
        path.mkdir(parents=True)
        return path
    home = Path(saved["path"]).parent.resolve() if saved else None
    if home != args.out_dir.resolve() and report.holds_a_run(args.out_dir):
        raise checkpoint.CheckpointError(
            f"--out-dir {args.out_dir} holds another run, or a run without its checkpoints: name a "
            "new folder, or go on with --resume auto"
        )
    args.out_dir.mkdir(parents=True, exist_ok=True)
    return args.out_dir


def save(run: Run, good: bool) -> list[str]:
    """Every rank brings its random state; rank 0 writes. Returns the names of non-finite tensors:
    then it has written nothing."""
    bad = []
    rng = all_values(checkpoint.rng_state(run.device))
    if run.rank == 0:
        bad = run.checkpoints.save(whole_state(run, rng), run.step, good=good)
    return agreed(bad)


def read_back(run: Run) -> None:
    """What "done" says of the disk: last.pt is this step and holds what this run holds, best.pt
    scores again what it was kept for, both are finite and as they were saved, and model.json
    describes them. CheckpointError on every rank otherwise."""
    reason = ""
    files = run.checkpoints
    about = run.folder / "model.json"
    if run.rank == 0:
        try:
            files.wait()  # raises where the last save failed
            last = schema.load(files.last)
            step = last["step"]
            best = checkpoint.load(files.best)
            shapes = {name: t.shape for name, t in checkpoint.named_tensors(best)}
            with schema.reading(about):
                known = json.loads(about.read_text("utf-8")) if about.is_file() else {}
                known |= {"evaluated": 0}  # it may be older
            files.compare()
            wanted = json.loads(json.dumps(validation.describe(run)))
            if step != run.step:
                reason = f"{files.last} is of step {step}, not of {run.step}"
            elif other := first_difference(run, last):
                reason = f"{files.last} holds another {other} than this run"
            elif shapes != {name: t.shape for name, t in run.net.state_dict().items()}:
                reason = f"{files.best} does not hold the weights of this network"
            elif bad := checkpoint.non_finite(best):
                reason = f"{files.best} is non-finite in {bad[0]}"
            elif known != wanted | {"evaluated": 0}:
                reason = f"{about} does not describe best.pt"
        except (checkpoint.CheckpointError, OSError) as error:
            reason = str(error)
    if not agreed(reason) and run.best:
        score, loss = validation.score_again(run, checkpoint.load(files.best))
        # One image may fall on either side, and a loss with noise differs with the batches.
        near = abs(score - run.best[0]) <= 0.05 * abs(score) + 100 / len(run.data.val[1])
        if not near or abs(loss - run.best[1]) > 0.05 * abs(loss) + 1e-6:
            reason = (
                f"{files.best} scores {score:.6g} with a loss of {-loss:.6g}, and was kept "
                f"for {run.best[0]:.6g} with {-run.best[1]:.6g}"
            )
    if reason := agreed(reason):
        raise checkpoint.CheckpointError(f"not done: {reason}")


def first_difference(run: Run, saved: dict) -> str:
    """The name of the first tensor of a state that is not what the run holds; ""."""
    mine = whole_state(run, rng=[])
    # O3 has rounded what it took over of another level.
    half = not run.policy.masters and run.policy.param_dtype
    kinds = ["model", "optimizers", "schedule"]
    if mine["ema"] and saved["ema"]:  # else it was started again with another --ema
        kinds.append("ema")
    trees = [{kind: state[kind] for kind in kinds} for state in (mine, saved)]
    held, written = (dict(checkpoint.named_tensors(tree)) for tree in trees)
    for name in held.keys() | written.keys():
        pair = [tree[name].cpu() for tree in (held, written) if name in tree]
        if half and pair[0].is_floating_point():
            pair = [t.to(half) for t in pair]
        if len(pair) < 2 or not pair[0].equal(pair[1]):
            return name
    return "" if saved["updates"] == run.updates else "updates"


def whole_state(run: Run, rng: list[dict]) -> dict:
    """All that a run needs to go on, open findings included."""
    masters = optim.master_params(run.optimizers)
    weights = {name: masters.get(p, p) for name, p in run.net.named_parameters()}
    return {
        "step": run.step,
        "healing": asdict(run.healing),
        "pinned": pinned(run.net),
        "keep_output": pinned(run.net, keep_output=True),
        "policy": run.policy.name,
        "accum": run.accum,
        "quarantine": sorted(run.stream.quarantine),
        "model": run.net.state_dict() | weights,
        "optimizers": [optimizer_state(optimizer) for optimizer in run.optimizers],
        "schedule": run.schedule.state_dict(),
        "scaler": run.scaler.state_dict(),
        "ema": run.ema and run.ema.state_dict(),
        "guard": run.guard.state_dict(),
        "rng": rng,
        "identity": run.identity,
        "updates": run.updates,
        "scores": run.scores,
        "best": run.best,
    }


def optimizer_state(optimizer: Optimizer) -> dict:
    """Its state_dict with learning rates as numbers: a rate beyond any weight is no bad moment.
    Half moments, which O3 has, as fp32: loading rounds them back to the same bits."""
    state = optimizer.state_dict()
    groups = [group | {"lr": float(group["lr"])} for group in state["param_groups"]]
    return {"param_groups": groups, "state": tree_map_only(Tensor, Tensor.float, state["state"])}


def load_whole_state(run: Run, state: dict) -> str:
    """Resume where a whole_state() ends. Returns where, and what differs now."""
    changes = schema.describe_changes(state["identity"], run.identity, state["path"])
    with schema.reading(state["path"]):
        healing = state["healing"]
        run.healing = Healing(**healing | {"trend": Trend(**healing["trend"])})
        run.total_steps += run.healing.extra_steps
        if state["accum"] > state["identity"]["accum_steps"]:  # healing has added some
            run.accum = max(run.accum, state["accum"])
        run.stream.leave_out(state["quarantine"])
        keep_fp32(run.net, state["pinned"])  # first: these modules have fp32 weights
        keep_fp32(run.net, state["keep_output"], keep_output=True)
        if EAGER_MODE in run.healing.healed:
            run.compiled = run.ddp
        run.guard.watch(run.net)  # pinning may have exchanged buffers
        # As it began; it may have been given up.
        if run.policy.name == state["identity"]["precision"]:
            adopt(run, state["policy"])
        restore(run, state)
        run.scaler.load_state_dict(state["scaler"])
        if pending := state["guard"]["pending"]:
            _, row, names = pending
            losses = loss_names(run.world_size)
            fixed = len(run.guard.names) - len(losses)
            known = {"loss", "grad_norm"} <= {*names} and all(map(str.isidentifier, names))
            if len(row) < fixed + 32 or len(names) > 31 or not known:
                raise ValueError("its pending verdict cannot be read")
            # It may be of another number of ranks: each is said to have had rank 0's loss.
            loss = row[names.index("loss") - 31]
            pending[1] = row[:fixed] + [loss] * len(losses) + row[-32:]
        run.guard.load_state_dict(state["guard"])
        run.step = state["step"]
        if "val_loss" in state["scores"] and all(map(math.isfinite, state["scores"].values())):
            run.scores = state["scores"]  # else it is validated again
        run.best = state["best"]
        before = state["identity"]
        own = {key: fact for key, fact in run.identity.items() if key.startswith("val_")}
        if any(before.get(key, fact) != fact for key, fact in own.items()):
            run.best = None  # a score of other images
            run.scores = {}
            run.healing.other_set = run.step
        if run.rank < len(state["rng"]):
            checkpoint.set_rng_state(state["rng"][run.rank], run.device)
    return "; ".join([f", resumed from {state['path']} after step {run.step}", *changes])


def restore(run: Run, state: dict) -> None:
    """Weights, masters, moments, schedule and average of a state of any precision level."""
    schema.load_weights(run.net, state["model"])
    names = {p: name for name, p in run.net.named_parameters()}
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        groups = optimizer.state_dict()["param_groups"]  # decay, betas and eps are the flags'
        if [g["params"] for g in groups] != [g["params"] for g in saved["param_groups"]]:
            raise ValueError(
                "the checkpoint's optimizer groups its parameters differently: a "
                "run cannot switch to or from --weight-decay 0"
            )
        schema.refuse_moments(optimizer, saved)
        masters = [state["model"][names[p]].float() for p in getattr(optimizer, "masters", ())]
        optimizer.load_state_dict(saved | {"param_groups": groups, "masters": masters})
    run.schedule.load_state_dict(state["schedule"])
    if run.ema:
        average = state["ema"]
        if average is None:  # it begins with these weights
            average = EMA(optim.master_params(run.optimizers).values()).state_dict()
        run.ema.load_state_dict(average)
    run.updates = state["updates"]


def adopt(run: Run, precision: str) -> None:
    """Another policy, with a loss scale of its own. Half weights become what their masters hold."""
    caps = amp_policy.capabilities(run.device)
    policy = amp_policy.choose_policy(precision, caps, None, None)
    if run.policy.param_dtype is not policy.param_dtype:
        widen(run.optimizers)
        for t in (*run.net.parameters(), *run.net.buffers()):  # frozen ones, and the buffers of O3
            if t.dtype in amp_policy.HALF:
                t.data = t.data.float()
        run.guard.watch(run.net)
        compiles = run.compiled is not run.ddp
        run.ddp = parallel(run.model, run.device)  # the old one's hooks hang on half weights
        run.compiled = torch.compile(run.ddp, dynamic=False) if compiles else run.ddp
    run.policy = policy
    run.scaler = amp_policy.LossScaler(run.device.type, enabled=policy.scales)


@torch.no_grad()
def widen(optimizers: list[Optimizer]) -> None:
    """Half parameters become fp32 in place, with what their masters hold; moments too."""
    for optimizer in optimizers:
        for p, t in optim.master_params([optimizer]).items():
            if p.dtype in amp_policy.HALF:
                p.grad = None  # of the old dtype
                p.data = t.detach().float()
                state = optimizer.state[p]
                optimizer.state[p] = {name: value.float() for name, value in state.items()}
        getattr(optimizer, "masters", {}).clear()
