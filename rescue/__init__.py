"""
Rescue: what a long run wants beyond skipping: it examines a bad step, heals the run, notices a loss
with finite numbers, compares hardware with itself, plants faults.

Rescue has the methods of record.Plain: train.py asks it at these places, and prepare.py makes it.
No other file of the trainer knows this folder. Delete it, and autopsy/ with it, and train.py trains
on. The order in a step: begin(), watch(), findings() of the verdict, respond() to each.
"""

import statistics

import torch

import ranks
from checkpoint import CheckpointError
from rescue import capsule, evidence, heal, inject, notice, probes, verify
from trainer.record import Finding, Kind, Plain, StepWatch, loss_names


def is_due(step, every):
    """Whether a step is one of each `every`; 0: none is."""
    return bool(every) and step % every == 0


def is_one_image(run):
    """Whether a micro-batch cannot be halved."""
    return 2 * run.accum > run.args.batch_size // run.world_size


class Inspection(StepWatch):
    """A step that is looked at: its weights and moments, a piece of it run twice, probes."""

    def __init__(self, run, step, images, labels):
        self.run = run
        self.step = step
        self.eager = is_due(step, run.args.probe_every)
        self.sampler = probes.Probes(run.net, run.device).attach() if self.eager else None
        verifies = is_due(step, run.args.verify_every)
        self.unsure = verifies and not verify.is_repeated(run, step, images, labels)
        self.figures = None

    def inspect(self):
        if self.unsure:
            self.run.guard.carry("unsure_rank", self.run.rank + 1)
        self.figures = notice.inspect_step(self.run, self.step, self.sampler)

    def end(self):
        notice.note_figures(self.run, self.step, self.figures.read())


class Rescue(Plain):
    """All of it. It keeps no state of the run: that is in run.healing, which a checkpoint holds."""

    carries = ("micro_batches", "unsure_rank", "checksum", "negative_checksum")
    record = None  # of the step under way, made before it ran
    retaking = False

    @staticmethod
    def replay(path):
        with ranks.refusing(CheckpointError, ValueError):
            return capsule.replay(path, heal.rerun)

    def attach(self, run):
        spec = run.args.inject
        run.injector = inject.Injector(run.net, spec, run.model, run.rank, run.policy.scales)

    def begin(self, run, images, labels):
        if not run.args.inject:
            return images, labels
        run.injector.begin(run.step, run.optimizers, run.scaler.scale_tensor)
        return run.injector.batch(images, labels)

    def reads_at_once(self, run):
        return run.step <= run.healing.hunt_until

    def watch(self, run, step, images, labels):
        # After a bad step the next ones are recorded before they run: examine() needs them whole.
        recording = self.reads_at_once(run) and not self.retaking
        self.record = heal.record_step(run, step, images, labels) if recording else None
        verifies = is_due(step, run.args.verify_every)
        inspects = verifies or is_due(step, run.args.probe_every) or notice.is_look(run, step)
        watch = Inspection(run, step, images, labels) if inspects else StepWatch()
        watch.eager = watch.eager or recording
        return watch

    def findings(self, run, verdict):
        step, carried, stats = verdict.step, verdict.carried, verdict.stats
        if carried["micro_batches"]:
            run.accum = max(run.accum, int(carried["micro_batches"]))
            run.log.warn(
                step,
                f"out of memory at step {step}: from now on {run.accum} "
                "micro-batches a step on each rank",
            )
        if "veto" in verdict.reasons:  # see out_of_memory()
            return [Finding(Kind.NO_MEMORY, step, verdict)]
        if not verdict.accepted:
            if run.args.on_nonfinite != "heal":
                return []
            run.healing.hunt_until = step + 50
            return [Finding(Kind.REJECTED, step, verdict)]
        findings = []
        ranks_differ = carried["checksum"] != -carried["negative_checksum"]
        if carried["unsure_rank"] or ranks_differ:
            findings.append(Finding(Kind.MISMATCH, step, verdict))
        loss = stats["loss"]
        if run.world_size > 1:
            losses = [carried[name] for name in loss_names(run.world_size)]
            loss = statistics.mean(losses)
            if warning := notice.parted_rank(run, losses):
                run.log.warn(step, warning)
        if reason := notice.judge_loss(run, loss, stats["grad_norm"]):
            findings.append(Finding(Kind.LOST, step, verdict, reason))
        return findings

    def respond(self, run, finding, again):
        kind, step, verdict, reason = finding
        if kind is Kind.NO_MEMORY:
            return None, self.retry_smaller(run, step, again)
        if kind is Kind.REJECTED and step <= run.healing.examined_until:
            return None, []  # it ran before the cure of another finding
        if kind is Kind.MISMATCH:
            cure = verify.compare_ranks(run, verdict)
        elif kind is Kind.LOST:
            cure = heal.diverged(run, reason)
        else:
            made_before = self.record and self.record.step == step
            cure = heal.examine_and_heal(run, step, self.record if made_before else None)
        heal.log_cure(run, cure)
        return cure.end, []

    # --- Memory that ends

    def out_of_memory(self, run):
        """This rank's memory ended while DDP averaged: no rank uses this average, and all retake
        the step."""
        if is_one_image(run):
            raise torch.OutOfMemoryError("one image a micro-batch does not fit into memory")
        run.guard.carry("veto", run.rank + 1)
        run.guard.carry("micro_batches", 2 * run.accum)

    def make_room(self, run, error):
        """This rank's memory ended before any collective of the step. Half the micro-batch, twice
        as many of them: the update stays the same within rounding. A CUDA graph gives back its
        pool, and there is no other: memory that ends in a recording ends the run. This rank begins
        the step again at once; the others follow at the verdict.

        Raises the error where it is another one, and where no room can be made: after the decision,
        with one image a micro-batch, and while a CUDA graph was recorded (CUDA's random numbers do
        not outlive that).
        """
        graph = run.graph
        recording = graph and graph.graph is None and graph.calls > graph.warm_up
        too_late = run.guard.state != "open" or recording
        if not ranks.out_of_memory(error) or too_late or is_one_image(run):
            raise error
        run.net.zero_grad()
        run.graph = None
        run.guard.restart()
        run.accum *= 2
        run.guard.carry("micro_batches", run.accum)

    def retry_smaller(self, run, step, again):
        """Repeat a step that did not fit into memory on some rank, in smaller micro-batches. Return
        what was found meanwhile."""
        attempts = run.args.batch_size.bit_length()  # each time they are halved
        findings = []
        for _ in range(attempts):
            self.retaking = True
            found = again(run, step, *heal.batch_again(run, step))
            self.retaking = False
            others = [finding for finding in found if finding[:2] != (Kind.NO_MEMORY, step)]
            findings += others
            if len(others) == len(found):
                return findings
        raise torch.OutOfMemoryError(f"step {step} did not fit into memory in {attempts} attempts")

    def unsound(self, run):
        return notice.unsound_validation(run)

    def vouches(self, run):
        return not notice.is_suspicious(run) and notice.sample_is_sound(run)

    def objections(self, run):
        return evidence.evidence_of_loss(run)
