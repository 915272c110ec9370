"""
The selective scan: the chunked one of models/vmamba.py beside the loop of its definition, forward
and backward.

    python bench/scan.py              # under a minute on 2 CPU cores; the GPU if there is one
    python bench/scan.py --smoke      # seconds: does it run?

One direction, batch 4, 64 channels. The loop is written as well as a loop can be (unbind and stack;
indexing x[:, t] would make its backward pass quadratic in the length). A round times both once,
interleaved; ratios are medians of ratios within rounds. Bytes are those of the distinct storages
that autograd keeps between forward and backward; twice those of half the length is linear.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import record
from models.vmamba import selective_scan, selective_scan_loop

BATCH = 4
CHANNELS = 64
GOAL = 10  # loop / chunked at length 1,024
SPEED = [(1024, 1), (1024, 8), (1024, 16), (256, 1), (4096, 1)]  # length, d_state
SCANS = {"chunked": selective_scan, "loop": selective_scan_loop}
LENGTHS = (256, 512, 1024, 2048, 4096)


def inputs(length, d_state, device):
    torch.manual_seed(0)

    def draw(*shape):
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


def forward_and_backward(scan, args):
    torch.autograd.grad(scan(*args), args, torch.ones_like(args[0]))


def kept_bytes(scan, args):
    """What autograd keeps for the backward pass, every storage once, the inputs included."""
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        # bound to a name: a freed graph would let the next tensor take a counted address
        y = scan(*args)
    del y
    return sum(sizes.values())


def main():
    parser = record.arguments(__doc__)
    args = parser.parse_args()
    rounds = 2 if args.smoke else 5 if args.device == "cuda" else 9
    head = record.begin("scan", args, "speedup", "kept_bytes", "samples")
    print(f"batch {BATCH}, {CHANNELS} channels, {head['hardware']}, n = {rounds}")
    for length, d_state in [(64, 1)] if args.smoke else SPEED:
        name = f"L {length}, d_state {d_state}"
        if name in head["samples"]:  # an earlier process has it
            continue
        tensors = inputs(length, d_state, args.device)
        passes = {
            name: partial(forward_and_backward, scan, tensors) for name, scan in SCANS.items()
        }
        device = torch.device(args.device)
        rows = record.in_turns(passes, device, lambda done: done <= rounds)[1:]  # it warmed up
        head["samples"][name] = rows
        ratio = head["speedup"][name] = record.ratio(rows, "loop", "chunked")
        verdict = ("met" if ratio["median"] >= GOAL else "MISSED") if length == 1024 else "no goal"
        milliseconds = record.spread([row["chunked"] for row in rows])["median"]
        print(
            f"  {name:20} {milliseconds:8.2f} ms, {ratio['median']:5.1f} times faster, goal "
            f"{GOAL}: {verdict}"
        )
        record.keep(head, args)
    for d_state in (1, 8):
        rows = head["kept_bytes"][f"d_state {d_state}"] = {}
        for length in LENGTHS[: 2 if args.smoke else None]:
            tensors = inputs(length, d_state, args.device)
            rows[length] = {
                name: kept_bytes(scan, tensors)
                for name, scan in SCANS.items()
                if name == "chunked" or length <= 1024
            }
            before = rows.get(length // 2, rows[length])["chunked"]
            print(
                f"  L {length:4}, d_state {d_state}: kept for the backward pass "
                f"{rows[length]['chunked'] / 2**20:7.2f} MiB, "
                f"{rows[length]['chunked'] / before:.3f} times that of half the length"
            )
    record.write(head, args, samples=("samples",))


if __name__ == "__main__":
    main()
