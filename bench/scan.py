"""
The selective scan: the chunked one of models/vmamba.py beside the loop of its definition, forward
and backward.

    python bench/scan.py              # under a minute on 2 CPU cores; the GPU if there is one
    python bench/scan.py --smoke      # seconds: does it run?

One direction, batch 4, 64 channels. The loop is written as well as a loop can be (unbind and stack;
indexing x[:, t] would make its backward pass quadratic in the length). A round times both once,
interleaved; ratios are medians of ratios within rounds. Bytes are those of the distinct storages
that autograd keeps between forward and backward (on a GPU also the peak of the allocator); "grows"
is bytes at one length over bytes at half of it: 2 is linear.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.record import header, spread, write  # noqa: E402
from models.vmamba import selective_scan, selective_scan_loop  # noqa: E402

BATCH = 4
CHANNELS = 64
GOAL = 10  # loop / chunked at length 1,024
SPEED = [(1024, 1), (1024, 8), (1024, 16), (256, 1), (4096, 1)]  # length, d_state
LENGTHS = (256, 512, 1024, 2048, 4096)


def inputs(length: int, d_state: int, device: str) -> list[Tensor]:
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    tensors = (
        draw(1, BATCH, length, CHANNELS),
        F.softplus(draw(1, BATCH, length, CHANNELS) - 2),
        -torch.exp(draw(1, CHANNELS, d_state)),
        draw(1, BATCH, length, d_state),
        draw(1, BATCH, length, d_state),
        draw(1, CHANNELS),
    )
    return [t.requires_grad_() for t in tensors]


def milliseconds(scan, args: list[Tensor]) -> float:
    """One forward and backward pass."""
    sync = torch.cuda.synchronize if args[0].is_cuda else lambda: None
    grad = torch.ones_like(args[0])
    sync()
    began = time.perf_counter()
    torch.autograd.grad(scan(*args), args, grad)
    sync()
    return (time.perf_counter() - began) * 1e3


def kept_bytes(scan, args: list[Tensor]) -> int:
    """What autograd keeps for the backward pass, every storage once, the inputs included."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        # bound to a name: a freed graph would let the next tensor take a counted address
        y = scan(*args)
    del y
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--rounds", type=int, default=5 if cuda else 9, help="the loop takes seconds on a GPU"
    )
    parser.add_argument("--smoke", action="store_true", help="short sequences, two rounds, no file")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    rounds = 2 if args.smoke else args.rounds
    raw = header("scan", vars(args), torch.device(device)) | {
        "n": rounds,
        "batch": BATCH,
        "channels": CHANNELS,
        "speedup": {},
        "kept_bytes": {},
        "samples": {},
    }

    print(
        f"forward and backward, batch {BATCH}, {CHANNELS} channels, {raw['hardware']}, "
        f"n = {rounds}, milliseconds: median (quartiles)"
    )
    for length, d_state in [(64, 1)] if args.smoke else SPEED:
        name = f"L {length}, d_state {d_state}"
        tensors = inputs(length, d_state, device)
        samples: dict[str, list[float]] = {"chunked": [], "loop": []}
        for i in range(rounds + 1):
            for contestant, scan in (("chunked", selective_scan), ("loop", selective_scan_loop)):
                ms = milliseconds(scan, tensors)
                if i:  # the first round warms up
                    samples[contestant].append(ms)
        ratio = statistics.median(
            b / a for a, b in zip(samples["chunked"], samples["loop"], strict=True)
        )
        raw["speedup"][name] = ratio
        raw["samples"][name] = samples
        cells = []
        for contestant in samples:
            low, high = spread(samples[contestant])["quartiles"]
            middle = statistics.median(samples[contestant])
            cells.append(f"{contestant} {middle:8.2f} ({low:.2f} .. {high:.2f})")
        verdict = ("met" if ratio >= GOAL else "MISSED") if length == 1024 else "no goal"
        print(
            f"  {name:20} {'   '.join(cells)}   {ratio:5.1f} times faster, goal {GOAL}: {verdict}"
        )

    print("kept for the backward pass, MiB")
    for d_state in (1, 8):
        rows = {}
        for length in LENGTHS[: 2 if args.smoke else None]:
            tensors = inputs(length, d_state, device)
            rows[length] = {"chunked": kept_bytes(selective_scan, tensors)}
            if length <= 1024:
                rows[length]["loop"] = kept_bytes(selective_scan_loop, tensors)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                milliseconds(selective_scan, tensors)
                rows[length]["chunked_peak"] = torch.cuda.max_memory_allocated()
        raw["kept_bytes"][f"d_state {d_state}"] = rows
        for length, row in rows.items():
            grows = (
                f"grows {row['chunked'] / rows[length // 2]['chunked']:.3f}"
                if length // 2 in rows
                else ""
            )
            cells = "   ".join(f"{k} {v / 2**20:7.2f}" for k, v in row.items())
            print(f"  L {length:4}, d_state {d_state}   {cells}   {grows}")

    if not args.smoke:
        write(raw, args.results, torch.device(device), samples=("samples",))


if __name__ == "__main__":
    main()
