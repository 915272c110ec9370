"""What rescue/ does beside a step, on a GPU that does not exist: which lines wait for it."""

import pytest
from test_fake_cuda import (
    CUDA,
    Guard,
    Watch,
    gpu,
    one_step,
    only_these_lines_ask,
    prepared,
    pytestmark,
)

from autopsy import step, verdict
from rescue import Rescue, heal, notice, verify
from rescue.inject import Injector
from rescue.probes import Probes

__all__ = ["gpu", "pytestmark"]  # as in test_fake_cuda


def look(run, images, labels, step=100, sampled=False):
    """A step with a look at all weights; with a sample of the probes."""
    sampler = Probes(run.net, CUDA).attach() if sampled else None
    figures = []
    one_step(run, images, labels, lambda: figures.append(notice.inspect_step(run, step, sampler)))
    figures[0].read()


def run_twice(run, images, labels):
    """What --verify-every does on one rank, and what every rank carries."""
    verify.is_repeated(run, 5, images, labels)
    run.guard.open()
    verify.carry_checksum(run)


FIGURES = "probes.py: rows = torch.stack(table).tolist() if table else []"
SIGNS = (
    'movement.py: rates |= dict.fromkeys(group["params"], float(group["lr"]))',
    "movement.py: numbers = torch.cat([*samples, flags]).cpu()",
)
PATHS = {  # as in test_fake_cuda
    "a look": (look, {FIGURES, *SIGNS}, (Guard, "see_state")),
    "a look with probes": (
        lambda *run: look(*run, sampled=True),
        {
            FIGURES,
            *SIGNS,
            "notice.py: sentences += sampler.warnings(float(run.scaler.scale_tensor))",
            "probes.py: table = self._rows.nan_to_num(nan=math.inf, posinf=math.inf).tolist()",
        },
        (Probes, "detach"),
    ),
    "a pass twice": (
        run_twice,
        {
            "verify.py: outcomes = {tuple(checksums(grads).tolist()) for grads in passes}",
        },
        (heal, "forward_backward"),
    ),
}


@pytest.fixture
def no_rng(monkeypatch):
    """Random states are the host's affair, and fake tensors hold none."""
    for module in (step, verdict):
        monkeypatch.setattr(module, "rng_states", lambda device: {})
        monkeypatch.setattr(module, "set_rng_states", lambda states, device: None)


@pytest.mark.parametrize("plant", [False, True], ids=["as it is", "a question planted"])
@pytest.mark.parametrize("path, lines, planted", PATHS.values(), ids=PATHS)
def test_only_the_lines_that_may_ask_do_ask(gpu, no_rng, path, lines, planted, plant):
    with gpu, Watch(answer=1):
        run, *batch = prepared(scales=not plant, carries=Rescue.carries)
        run.injector = Injector(run.net)
    only_these_lines_ask(gpu, run, batch, path, lines, planted if plant else None)
