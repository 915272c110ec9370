# SPDX-License-Identifier: MIT (finite 4.0.0, 2026-11-28)
"""
Graphs: a whole training step, guards included, as one CUDA graph.

A small network on a fast GPU waits for Python. A kernel on a few numbers takes 2 microseconds, its
launch takes 10, and the guards of a step are dozens of such kernels: they cost a lot beside a
network that is bound by its launches. A CUDA graph records the kernels of a step once. From then on
it launches all of them together.

The graph can hold the whole step because no line of the step reads from the device: verdict,
clipping, skip, loss scale and schedule are decided on the device (guards.py, optim.py). The graph
asks for three things in return:

    the same memory    A batch is copied into the graph's own input. Who exchanges weights, moments
                       or buffers for other tensors (a cure, a resume) calls drop(), and the next
                       steps are recorded anew.
    the same kernels   No branch on the host. A step that does more (probes, a record of the step, a
                       look at all weights) runs kernel by kernel, between two replays.
    more memory        The graph keeps its activations, and a step that runs kernel by kernel has
                       its own. Memory that ends in a recording ends the process (see NoGraph). So
                       there is no recording where both would leave less than a tenth of it free.

You may compile the recorded step: compile_if_it_pays() decides by the number of steps.

Copy this file alone: it needs torch.

Paste::

    import torch
    from graphs import StepGraph

    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.zeros((), device=device)
    step = StepGraph(lambda x, y: total.add_((x - y).square().mean()))
    if device == "cpu":
        step = step.take  # nothing to record
    for _ in range(10):
        step(torch.randn(8, 3, device=device), torch.randn(8, 3, device=device))
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

ROOM = 0.1  # of the device's memory
# Steps after which compiled code has paid for its making: 18.1 s, the slowest of five networks,
# divided by 1.5 ms, which their median saved a step (batches of 256, kernel by kernel, an H200 with
# torch 2.11 on 20 November 2026: git show 6bf2165:bench/results/compile_models-cuda.json). Inside
# of a CUDA graph it was not measured yet.
PAYS_AFTER = 12_000


def compile_if_it_pays(
    net: nn.Module, steps: int, trial: Callable[[nn.Module], object]
) -> tuple[nn.Module, str]:
    """`net`, or `net` compiled for fixed shapes, and a sentence that says why.

    steps: the calls that are to come with batches of one shape. trial: takes the compiled network
    through a forward and a backward, which makes its code. Whatever that raises (no C compiler, a
    construct that cannot be compiled), `net` goes on as it is.
    """
    if steps < PAYS_AFTER:
        return net, f"not compiled: it pays from {PAYS_AFTER:,} steps a shape on"
    compiled = torch.compile(net, dynamic=False)
    try:
        trial(compiled)
    except Exception as error:
        return net, f"not compiled: {type(error).__name__}: {error}".splitlines()[0]
    return compiled, "compiled"


class NoGraph(RuntimeError):
    """The step cannot be recorded."""


class StepGraph:
    """Calls `take(images, labels)` a few times, records it, and from then on replays the record.

    Args:
        take: the step. It changes tensors in place only; what it returns is dropped.
        warm_up: calls before the recording, for everything that is allocated at first use. A batch
            of another shape starts them again.
    Raises:
        NoGraph: at the recording. End the process then: torch's random numbers and pinned memory
            fail afterwards too.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], object], warm_up: int = 3):
        self.take, self.warm_up = take, warm_up
        self.drop()

    def drop(self) -> None:
        """Drop the graph: the next calls warm up and record again."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        if self.graph and images.shape != self.images.shape:  # a graph holds one shape
            self.drop()
        self.calls += 1
        if self.graph is None and self.calls > self.warm_up:
            self._record(images, labels)
        if self.graph is None:
            self.take(images, labels)
            return
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()

    def _record(self, images: Tensor, labels: Tensor) -> None:
        """Record the kernels without running them. Other threads (one that writes a checkpoint) may
        use CUDA meanwhile. Without room there is no graph."""
        gc.collect()  # a cycle may hold the autograd graph of a step: it would spoil the recording
        torch.cuda.empty_cache()  # a graph has its own memory and cannot use this
        free, total = torch.cuda.mem_get_info()
        need = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        if free - 2 * need < ROOM * total:
            self.warm_up = math.inf
            warnings.warn(
                "no CUDA graph: there is too little memory for it and a step beside it",
                stacklevel=3,
            )
            return
        self.images = images.clone()
        self.labels = labels.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.take(self.images, self.labels)
        except torch.OutOfMemoryError:  # a RuntimeError too; its cure is a smaller micro-batch
            raise
        except RuntimeError as error:
            why = "the step reads from the device, so it cannot be a CUDA graph"
            raise NoGraph(f"{why}: {error}") from error
        self.graph = graph
