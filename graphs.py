"""
Graphs: a whole training step, guards included, as one CUDA graph.

A small network on a fast GPU waits for Python: a kernel on a few numbers takes 2 microseconds, its launch 10, and the
guards of a step are dozens of such kernels. Beside a network that is bound by its launches they are dear. A CUDA graph
records the kernels of a step once, and from then on launches them all together.

It can hold the whole step because nothing in it asks the device a question: verdict, clipping, skip, loss scale and
schedule are decided there (guards.py, optim.py). What it asks for in return:

    the same memory    a batch is copied into the graph's own input; whoever exchanges weights, moments or buffers for
                       other tensors (a cure, a resume) calls drop(), and the next steps are recorded anew
    the same kernels   no branch on the host: a step that does more (probes, evidence, a look at all weights) is taken
                       kernel by kernel, in between
    more memory        the graph keeps its activations beside those of such steps

Copy this file alone: it needs torch and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class NoGraph(RuntimeError):
    """The step cannot be recorded."""


class StepGraph:
    """Calls `take(images, labels)` a few times, then records it, and from then on replays the record.

    Args:
        take: the step; it returns nothing, and changes tensors in place only. Batches have one shape.
        warm_up: calls before the recording, for everything that is made at first use.
    Raises:
        NoGraph: at the recording. After that torch's random numbers and pinned memory fail too: end the process.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], None], warm_up: int = 3):
        self.take, self.warm_up = take, warm_up
        self.drop()

    def drop(self) -> None:
        """Forget the record: the next calls warm up and record again."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, images: Tensor, labels: Tensor) -> None:
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
        """Kernels are noted down, not run. Other threads (a checkpoint being written) may use CUDA meanwhile."""
        self.images, self.labels, graph = images.clone(), labels.clone(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.take(self.images, self.labels)
        except torch.OutOfMemoryError:  # a RuntimeError with a cure of its own
            raise
        except RuntimeError as error:
            raise NoGraph(f"the step asks the device a question, so it cannot be a CUDA graph: {error}") from error
        self.graph = graph
