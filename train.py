"""
finite: train an image model in low precision, and keep every non-finite number out of its weights.

    python train.py                                         CIFAR-10, best precision this machine has
    python train.py --precision fp16 --epochs 8 --out-dir runs/a
    python train.py --epochs 8 --out-dir runs/a --resume auto       goes on where runs/a was killed
    torchrun --standalone --nproc_per_node=2 train.py       one process a GPU; the same batch, split

The last line of standard output is one JSON object:

    {"status": "done", "model": "cifarnet", ..., "updates": 300, "skipped": 0, "val_acc1": 80.1, ...}

Exit codes: 0 done, 2 bad arguments, 3 diverged, 4 bad data, 5 suspected hardware, 128+n stopped by signal n with a
checkpoint on disk.

Written to be read from top to bottom and changed: no trainer class, no callbacks, no config files.
"""

import contextlib
import functools
import math
import os
import pickle
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import amp_policy
import checkpoint
import flags
import fp32
import graphs
import guards
import heal
import inject
import optim
import report
import validation
from data import NAMES, SCALE, batches, fingerprint, load
from models import MODELS, wrap
from ranks import agreed, first_on_each_machine, join, parallel, quiet, refuse, refusing, share_buffers

CHECK_EVERY = 100  # steps between two looks at all parameters and optimizer state: a read of 12 bytes a parameter


def main(argv=None):
    args, began = flags.parse(argv, __doc__, MODELS, NAMES), time.time()
    build, recipe = MODELS[args.model]
    if args.replay:
        with refusing(ValueError, OSError, pickle.UnpicklingError):
            return heal.replay(args.replay, MODELS, wrap)
    with refusing(ValueError):
        device, rank, local_rank, world_size = join(args.device)
    cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if cuda else f"{device.type}, {os.cpu_count()} cores"
    torch.manual_seed(args.seed)  # the same weights on every rank
    random.seed(args.seed)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    # Data and precision. Whatever cannot work is refused here, before anything is written.
    with refusing(OSError, ValueError, code=4), first_on_each_machine(local_rank):
        progress = functools.partial(tqdm, desc="decoding", unit="image", leave=False, disable=quiet())
        left_out = []  # sentences about unreadable files
        train, val, classes, dataset = load(args.dataset, args.data_dir, progress, args.image_size, args.max_bad_share,
                                            None if args.workers else ".cache", left_out.append)
    if dataset == "synthetic" != args.dataset and rank == 0:
        print("CIFAR-10 is neither here nor reachable: training on the embedded synthetic images instead", flush=True)
    if args.num_classes not in (None, len(classes)):
        refuse(2, f"--num-classes {args.num_classes}, but {dataset} has {len(classes)} classes: leave the flag out")
    pieces = world_size * args.accum_steps
    if args.batch_size % pieces:
        refuse(2, f"--batch-size {args.batch_size} does not split evenly over {world_size} rank(s) and "
                  f"--accum-steps {args.accum_steps}: make it a multiple of {pieces}")
    with refusing(ValueError):
        policy = rank == 0 and amp_policy.choose_policy(args.precision, amp_policy.capabilities(device))
        policy = agreed(policy)  # two ranks may measure two things
        train, val = ((batches.place(images, device), labels) for images, labels in (train, val))
        stream = batches.TrainBatches(
            *train, batch_size=args.batch_size, rank=rank, world_size=world_size, seed=args.seed, device=device,
            scale=SCALE.get(dataset), size=val[0].shape[-1], cutout=args.cutout, workers=args.workers,
        )

    # Model
    with refusing(ValueError):
        names = [str(name) for name in classes]
        net = build(names, val[0].shape[-1])
    if hasattr(net, "init_from_data"):
        net.init_from_data(stream.normalize(train[0][:: max(10, len(train[1]) // 5000)]))
    net = net.to(device, memory_format=torch.channels_last)
    with refusing(ValueError):
        fp32.keep_fp32(net, args.keep_fp32)
        net = policy.prepare(net)
        if not policy.masters and not torch.tensor(args.adam_eps, dtype=policy.param_dtype) > 0:  # O3
            raise ValueError(optim.refusal(policy.param_dtype, args.adam_eps, 0.99))
        injector = inject.Injector(net, inject.parse_inject(args.inject), rank, scales=policy.scales)
    model = wrap(net, recipe["label_smoothing"])
    torch.manual_seed(args.seed + rank)  # from here on ranks draw different noise

    # Length: a GPU gets the whole recipe, a CPU a run of minutes.
    epoch_steps, why = stream.steps_per_epoch, "as asked"
    total_steps = max(1, round(args.epochs * epoch_steps)) if args.epochs else args.max_steps
    if not total_steps and device.type == "cpu":
        total_steps = round((300 if policy.name == "bf16" else 150) * min(1, 256 / args.batch_size))
        why = f"minutes on a CPU; --epochs {recipe['epochs']} is the whole recipe"
    elif not total_steps:
        total_steps, why = recipe["epochs"] * epoch_steps, "the whole recipe"
    warmup = int(total_steps * recipe["warmup"]) if args.warmup_updates is None else args.warmup_updates

    # Optimizer, loss scale, guard: with the model, all that a checkpoint has to carry
    with refusing(ValueError):
        optimizer = optim.ClippedAdamW(
            optim.param_groups(net, args.weight_decay, lr_scale=recipe["lr_scale"], muon=args.muon),
            lr=args.lr, betas=(0.9, 0.99), eps=args.adam_eps, amsgrad=args.amsgrad,
            clip=args.clip_grad or None, zclip=args.zclip, muon_options=recipe["muon_options"],
            schedule=optim.warmup_cosine(total_steps, warmup, kind="linear"),
            masters=None if policy.param_dtype is torch.float32 else policy.masters,
        )
    scaler = amp_policy.LossScaler(device.type, enabled=policy.scales)
    guard = guards.Guard(net, num_classes=len(classes), device=device)
    average = optim.EMA(optimizer.params, args.ema) if args.ema else None
    parts = {"model": net, "optimizer": optimizer, "guard": guard, "average": average}
    ranks = parallel(model, device)
    fast = torch.compile(ranks) if args.compile and not args.inject else ranks
    graphed = args.cuda_graph and cuda and world_size == 1 and not (args.inject or args.detect_anomaly)

    # Where to write, and what to go on from
    out_dir = args.out_dir or Path("runs") / f"{args.model}-{dataset}-{policy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    out_dir = Path(agreed(str(out_dir)))  # the clock may tick between two ranks
    if args.resume == "none" and (out_dir / "metrics.jsonl").exists():
        refuse(2, f"--out-dir {out_dir} holds another run: name a new folder, or go on with --resume auto")
    if args.resume == "auto" and not args.out_dir:
        refuse(2, "--resume auto goes on in a folder: say which with --out-dir")
    agreed(None)  # nobody writes before everybody has looked
    facts = {"model": args.model, "dataset": dataset, "num_classes": len(classes), **fingerprint(*train),
             "precision": policy.name, "world_size": world_size, "batch_size": args.batch_size,
             "accum_steps": args.accum_steps, "lr": args.lr, "total_steps": total_steps, "ema": args.ema,
             "seed": args.seed, "torch": str(torch.__version__)}
    step, losses, scores, note = 0, [0.0, 0], {}, ""
    with refusing(checkpoint.CheckpointError, OSError, ValueError, RuntimeError):
        out_dir.mkdir(parents=True, exist_ok=True)
        checkpoints = checkpoint.Checkpoints(out_dir)
        healer = heal.Healer(model, parts, policy, scaler, guard, injector, checkpoints, device=device, rank=rank,
                             accum=args.accum_steps, max_cures=args.max_cures)
        validator = validation.Validation(
            model, net, optimizer, average, *val, stream.normalize, checkpoints, device=device, rank=rank,
            world_size=world_size, forced=args.eval_precision == "fp32", workers=args.workers,
        )
        parts = {"healer": healer, **parts, "validator": validator}  # what the healer has pinned has fp32 weights
        found = checkpoints.newest() if args.resume == "auto" else None
        if args.resume not in ("auto", "none"):
            found = args.resume, checkpoint.load(args.resume)
        if found:
            path, state = found
            if "facts" not in state:
                raise checkpoint.CheckpointError(f"{path} holds weights, not a run: resume from a last.pt")
            changes = checkpoint.describe_changes(state["facts"], facts)
            for name, part in parts.items():
                if part and state[name] is not None:
                    part.load_state_dict(state[name])
            step, losses, scores = state["step"], state["losses"], state["scores"]
            if rank < len(state["rng"]):
                checkpoint.set_rng_state(state["rng"][rank], device)
            note = "; ".join([f", resumed from {path} after step {step}", *changes])
        policy, scaler, accum = healer.policy, healer.scaler, healer.accum
    with refusing(ImportError, advice="; --tensorboard needs it: pip install tensorboard"):
        header = {"args": vars(args), **facts, "hardware": hardware, "commit": report.commit() if rank == 0 else ""}
        log = report.MetricsFile(out_dir, header, step, args.tensorboard, speaks=rank == 0)

    def say(text):
        if rank == 0:
            tqdm.write(text)
            sys.stdout.flush()

    def warn(text):
        log.write(event="warning", step=step, text=text)
        say(f"step {step}: {text}")

    # The card: every decision with its reason
    micro, pinned, rule = args.batch_size // pieces, fp32.pinned(net), ""
    if args.lr == recipe["lr"] and args.batch_size != recipe["batch_size"]:
        _, rule = optim.scaled_lr(args.lr, args.batch_size, recipe["batch_size"])
        rule = f"; the lr is not scaled, the rule would be {rule}"
    for name, decision in {
        "device": f"{hardware}, torch {torch.__version__}",
        "precision": f"{policy}{'; fp32 islands: ' * bool(pinned) + ', '.join(pinned)}",
        "evaluation": "fp32, whatever the training precision" if args.eval_precision == "fp32" else "as in training",
        "data": f"{dataset}: {len(train[1]):,} training and {len(val[1]):,} validation images, {len(classes)} classes",
        "model": f"{args.model}, {sum(p.numel() for p in net.parameters()) / 1e6:.2f} million parameters",
        "optimizer": f"{optimizer.description}; lr {args.lr:g} after {warmup} updates of warm-up, then linear to 0",
        "batch": f"{args.batch_size} images = {micro} a micro-batch x {args.accum_steps} x {world_size} rank(s){rule}",
        "step": "one CUDA graph, guards included" if graphed else "kernel by kernel",
        "length": f"{total_steps} steps = {total_steps / epoch_steps:.1f} epochs: {why}",
        "output": f"{out_dir}{note}",
    }.items():
        say(f"{name:<11} {decision}")
    for text in left_out:
        warn(text)

    def save():
        """Every rank brings its RNG; rank 0 writes. A state that holds a non-finite number is refused, not written."""
        share_buffers(net)
        rng = [checkpoint.rng_state(device)] * world_size
        if world_size > 1:
            dist.all_gather_object(rng, rng[0])
        doubt = False
        if rank == 0:
            state = {name: part and part.state_dict() for name, part in parts.items()}
            state |= {"rng": rng, "facts": facts, "losses": losses, "scores": scores}
            bad = checkpoints.save(state, step, good=guard.skipped_in_a_row == 0)
            if bad:
                doubt = True  # the next step will be rejected on every rank, and examined
                log.write(event="save refused", step=step, tensors=bad)
        return doubt

    def digest(verdict):
        """The host's side of a step: counts it, logs it, and decides whether to go on. The same on every rank."""
        nonlocal status, code
        if verdict is None:
            return
        stats = {**verdict.stats, "updates": int(verdict.stats["updates"])}
        if verdict.accepted:
            losses[0], losses[1] = losses[0] + stats["loss"], losses[1] + 1
        else:
            reasons = verdict.reasons or ("grad",)  # no flag was up: it was the gradient's norm
            log.write(event="skip", step=verdict.step, reasons=reasons, rank=verdict.rank, **stats)
            healer.hunt_until = verdict.step + 50
            if args.on_nonfinite == "stop" or guard.skipped_in_a_row >= args.max_skips:
                status, code = "diverged", 3
        for sentence in verdict.spikes:
            log.write(event="spike", step=verdict.step, text=sentence)
        if verdict.signal:
            status, code = f"stopped by signal {verdict.signal}", 128 + verdict.signal
        if verdict.step % args.log_every == 0:
            log.write(step=verdict.step, **stats, skipped=guard.skipped)
            bar.set_postfix({name: f"{value:.4g}" for name, value in stats.items()}, skipped=guard.skipped)

    def check_up(probes):
        """What is too dear for every step, between the last backward and the decision: all weights and all moments."""
        guard.see_state(param=dict(net.named_parameters()), optstate=optimizer.state)
        warnings = guards.first_step_checks(net, None if model is net else len(classes)) if step == 1 else []
        if probes:
            probes.detach()
            warnings += probes.warnings(float(scaler.scale_tensor))
        for warning in warnings:
            warn(warning)

    def take_step(images, labels, forward, look=False, probes=None):
        """All of a step that happens on the device. No host sync, no branch on a value: a CUDA graph can hold it."""
        # 1. Every micro-batch: forward under autocast, loss in fp32, scaled backward. What looks bad raises a flag
        #    on the device and nothing else: leaving early would make the ranks average different steps.
        sums, micro_batches = {}, list(zip(images.chunk(accum), labels.chunk(accum), strict=True))
        for i, (x, y) in enumerate(micro_batches):
            y = guard.see_batch(x, y)
            share = len(x) / len(images)  # an uneven last micro-batch weighs what it holds
            wait = world_size > 1 and i + 1 < len(micro_batches)
            with ranks.no_sync() if wait else contextlib.nullcontext():
                with policy.autocast():
                    loss, metrics = forward(x, y)
                loss = injector.loss(loss, i)
                guard.see_loss(loss)
                scaler.scale(loss * share).backward()
            for name, value in (metrics | {"loss": loss.detach()}).items():
                sums[name] = sums.get(name, 0.0) + value.mean() * share
        injector.buffers()
        if look or probes:
            check_up(probes)
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

    graph = graphs.StepGraph(functools.partial(take_step, forward=fast)) if graphed else None
    status, code, trained, busy = "done", 0, 0, 0.0
    doubt = agreed(step == 0 or not checkpoints.last_good.exists()) and save()  # always a last_good to go back to
    bar = tqdm(total=total_steps, initial=step, disable=quiet(), unit="step")
    model.train()
    tick = time.time()
    remedy = "\n  try: the same command with twice the --accum-steps, and --resume auto"
    with (refusing(checkpoint.CheckpointError, code=1), refusing(torch.OutOfMemoryError, code=1, advice=remedy),
          refusing(graphs.NoGraph, code=1, advice="\n  try: --no-cuda-graph"), checkpoint.StopSignals() as stop,
          checkpoints, bar):
        while step < total_steps and status == "done":
            step += 1
            injector.begin(step)
            images, labels = stream.at(step - 1)
            images, labels = injector.input(images), injector.label(labels)
            hunting = args.on_nonfinite == "heal" and step <= healer.hunt_until
            if guard.lag == hunting:  # after a bad step the next ones are recorded, and their verdicts read at once
                digest(guard.flush())
                guard.lag = not hunting
            evidence = healer.record(step, images, labels, stream.indices(step - 1)) if hunting else None
            probes = guards.Probes(net, device) if args.probe_every and step % args.probe_every == 0 else None
            if probes:
                probes.attach()
            injector.state(optimizer, scaler.scale_tensor)
            guard.open(step)
            guard.raise_flag("signal", stop.number)
            guard.raise_flag("param", doubt)

            look = step % CHECK_EVERY == 0 or step == 1
            if graph and not (evidence or probes or look):
                graph(images, labels)
            else:  # compiled code ignores hooks that came after it
                take_step(images, labels, ranks if probes or evidence else fast, look, probes)
            if graph and evidence:
                graph.drop()  # a cure exchanges what it holds
            # 5. What happened reaches the host one step late: the device never waits for a question.
            verdict = guard.verdict()
            digest(verdict)
            if look:
                log.write(step=step, **{name: value for name, value in optimizer.statistics().items() if "/" in name})
            if evidence and not verdict.accepted and status == "done":
                cure = healer.treat(evidence, model_name=args.model, inject=args.inject, class_names=names,
                                    image_size=images.shape[-1])
                policy, scaler, accum = healer.policy, healer.scaler, healer.accum
                status, code, doubt = cure.status, cure.code, False
                if cure.action:
                    why = cure.report
                    log.write(event="cure", step=step, verdict=why.verdict, module=why.module, op=why.op,
                              samples=why.indices, action=cure.action)
                    say(f"{why}\n  -> {cure.action}")

            trained += args.batch_size
            bar.update()
            end_of_epoch = step % epoch_steps == 0 or step == total_steps
            time_to_save = step % (args.ckpt_every or epoch_steps) == 0 or step == total_steps
            if end_of_epoch or time_to_save or status != "done":
                digest(guard.flush())
            if end_of_epoch and (status == "done" or status.startswith("stopped")):
                busy += time.time() - tick
                scores, warning = validator.run(policy, step, log)
                if warning:
                    warn(warning)
                mean = losses[0] / losses[1] if losses[1] else math.nan
                log.write(step=step, epoch=step / epoch_steps, train_loss=mean, **scores)
                say(f"epoch {step / epoch_steps:.2f}  step {step}  loss {mean:.4f}  "
                    + "".join(f"{name} {value:.4f}  " for name, value in scores.items() if name.startswith("val_"))
                    + f"skipped {guard.skipped}  {trained / busy:.0f} images/s")
                losses, tick = [0.0, 0], time.time()
            if (time_to_save and status == "done") or status.startswith("stopped"):
                doubt = save()
            checkpoints.poll()

    # The verdict
    busy += time.time() - tick
    summary = {
        "status": status, "model": args.model, "dataset": dataset, "precision": policy.name, "steps": step,
        "updates": int(optimizer.updates), "skipped": guard.skipped, "healed": healer.healed,
        **{name: round(value, 4) for name, value in scores.items() if name.startswith("val_")},
        "seconds": round(time.time() - began, 1), "images_per_second": round(trained / max(busy, 1e-9), 1),
        "peak_memory_mb": report.peak_memory_mb(cuda),
    }
    log.finish(summary)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if "RANK" in os.environ:
        os._exit(code)  # gloo's threads sometimes abort a process that has ended well
    sys.exit(code)
