"""
The README's pictures, drawn from the raw files in bench/results:  python bench/figures.py   (needs matplotlib)

Transparent SVG with grey text, so that they read on a light page and on a dark one. The same raw files give the same
bytes, and each picture says in its metadata which files those were, with their SHA-256 (tests/test_readme.py compares).
"""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = Path(__file__).resolve().parent / "figures"
GREY, RED, BLUE, ORANGE, GREEN = "#768390", "#e5534b", "#4184e4", "#cc8a1e", "#46954a"  # seen on white and on black
STYLE = {"text.color": GREY, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY,
         "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False, "axes.spines.right": False,
         "axes.titlesize": 10, "svg.hashsalt": "finite", "legend.frameon": False, "font.size": 10,
         "savefig.transparent": True}


def raw(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def save(figure, name, *sources):
    """One SVG; `sources`: the raw files it was drawn from, without their .json."""
    FIGURES.mkdir(exist_ok=True)
    sums = [f"{name}.json {hashlib.sha256((RESULTS / f'{name}.json').read_bytes()).hexdigest()}" for name in sources]
    figure.savefig(FIGURES / name, metadata={"Date": None, "Source": ", ".join(sums)})
    pyplot.close(figure)
    print(FIGURES / name)


def smooth(losses, window=10):
    """The mean of the finite losses among the last `window`; at a lost step NaN, which is drawn as a gap."""
    out = []
    for i in range(len(losses)):
        some = [loss for loss in losses[max(0, i - window + 1) : i + 1] if loss is not None]
        out.append(sum(some) / len(some) if some and losses[i] is not None else float("nan"))
    return out


def died_and_healed():
    """Left, the losses, with every step that the stock loop lost; right, the loss scale at which it ended."""
    run = raw("died_and_healed-cpu")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2), width_ratios=(2, 1), layout="constrained")
    steps = range(1, len(run["died"]) + 1)
    lost = [step for step, loss in zip(steps, run["died"], strict=True) if loss is None]
    healed = smooth(run["healed"])
    bottom = min(filter(None, run["healed"])) - 0.25
    left.plot(steps, healed, color=BLUE, label="train.py", linewidth=1.8)
    left.plot(steps, smooth(run["died"]), color=ORANGE, label="stock AMP loop", linewidth=1.4)
    left.plot(lost, [bottom] * len(lost), "|", color=RED, markersize=9, label=f"its steps lost to NaN ({len(lost)})")
    for cure in [event for event in run["events"] if event["event"] == "cure"]:
        left.annotate(f"step {cure['step']}: {cure['module']}\nis kept in fp32 from now on",
                      (cure["step"] + 1, healed[cure["step"]]), (cure["step"] - 20, bottom + 0.25), color=BLUE,
                      arrowprops={"arrowstyle": "->", "color": BLUE})  # at the step after, which has a loss
    left.set(xlabel="step", ylabel="training loss (mean of 10)",
             ylim=(bottom - 0.05, max(filter(None, run["died"])) + 0.12))
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.17), ncols=3)
    right.plot(steps, run["healed_scales"], color=BLUE, linewidth=1.8)
    right.plot(steps, run["died_scales"], color=ORANGE, linewidth=1.4)
    for scales, colour, across in ((run["healed_scales"], BLUE, 0), (run["died_scales"], ORANGE, -50)):
        right.annotate(f"ends at {scales[-1]:.4g}" if scales[-1] > 1 else f"ends at {scales[-1]:.1g}",
                       (len(steps), scales[-1]), (across, -6 if scales[-1] > 1 else 6), textcoords="offset points",
                       color=colour, ha="right", va="top" if scales[-1] > 1 else "center")
    right.set(yscale="log", xlabel="step", ylabel="loss scale", yticks=[10.0**i for i in range(-30, 1, 10)])
    save(figure, "died_and_healed.svg", "died_and_healed-cpu")


def curves(name):
    """Training loss of every model, a thin bf16 line on a broad fp32 one; one pair a seed."""
    runs = raw(name)["runs"]
    models = list(dict.fromkeys(run["model"] for run in runs))
    columns = min(4, len(models))
    rows = -(-len(models) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(2.6 * columns, 2.2 * rows), layout="constrained",
                                   squeeze=False)
    for axis in axes.flat[len(models) :]:
        axis.set_axis_off()
    for axis, model in zip(axes.flat, models, strict=False):
        for run in sorted((run for run in runs if run["model"] == model), key=lambda run: run["precision"] == "bf16"):
            bf16 = run["precision"] == "bf16"
            axis.plot(*zip(*run["curve"], strict=True), color=ORANGE if bf16 else BLUE, linewidth=1.1 if bf16 else 3.6,
                      alpha=1.0 if bf16 else 0.35, label=run["precision"] if run["seed"] == 0 else None)
        axis.set_title(model)
        if model in ("dit", "slat_vae"):
            ticks = [0.1, 0.3, 1] if model == "dit" else [0.03, 0.1, 0.3]
            axis.set(yscale="log", yticks=ticks, yticklabels=ticks)
            axis.minorticks_off()
    axes.flat[0].legend()
    figure.supxlabel("step", color=GREY, fontsize=10)
    figure.supylabel("training loss of one batch", color=GREY, fontsize=10)
    save(figure, f"{name}.svg", name)


def safety():
    """Guarded step / bare step, every workload, median and quartiles; beside it PyTorch's own recipe."""
    names = "guard_cost-cpu", "guard_cost-cuda"
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharex=True)
    ways = (("ours", "guarded / bare", BLUE, "o", -0.2),
            ("stock AMP recipe (clip)", "stock AMP recipe / bare", ORANGE, "s", 0.05),
            ("ours, CUDA graph", "guarded as CUDA graph / bare as CUDA graph", GREEN, "D", 0.3))
    for axis, record in zip(axes, map(raw, names), strict=True):
        rows = {title: cells for title, cells in record["ratios"].items() if title.endswith(", bfloat16")}
        for way, label, colour, marker, down in ways:
            drawn = [(i + down, cells[way]) for i, cells in enumerate(rows.values()) if way in cells]
            if not drawn:
                continue
            places, cells = zip(*drawn, strict=True)
            spread = zip(*(cell["quartiles"] for cell in cells), strict=True)
            axis.hlines(places, *spread, color=colour, linewidth=1.4)
            axis.plot([cell["median"] for cell in cells], places, marker, color=colour, markersize=5, label=label)
        rounds = sorted({cells["ours"]["n"] for cells in rows.values()})
        axis.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--")
        axis.set(title=f"{record['hardware']}, n = {' to '.join(map(str, sorted({rounds[0], rounds[-1]})))}",
                 yticks=range(len(rows)), yticklabels=[title.removesuffix(", bfloat16") for title in rows],
                 xlabel="time of a training step, bare = 1")
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, "guard_cost.svg", *names)


def time_to_accuracy():
    """Validation accuracy of every seed over seconds of training, ours beside the peer: on the CPU and on the GPU."""
    names = ("time_to_accuracy-cpu", "time_to_accuracy-cuda")
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
    for axis, record in zip(axes, map(raw, names), strict=True):
        seconds, plain = (record["columns"].index(name) for name in ("seconds", "plain"))
        for (who, seeds), colour, height in zip(record["curves"].items(), (BLUE, ORANGE), (0.16, 0.05), strict=True):
            for seed in seeds:
                axis.plot([point[seconds] for point in seed], [point[plain] for point in seed], color=colour,
                          linewidth=1.2, alpha=0.8)
            time, accuracy = (statistics.mean(seed[-1][column] for seed in seeds) for column in (seconds, plain))
            axis.text(0.98, height, f"{who}, {seeds[0][-1][0]:g} epochs: {accuracy:.1f} % after {time:.3g} s",
                      color=colour, ha="right", transform=axis.transAxes)
        where = "two CPU cores" if "cpu" in record["arguments"]["device"] else record["hardware"]
        axis.set(xlabel=f"seconds of training, {where}; seeds: {len(seeds)} each", xlim=(0, None))
    axes[0].set(ylabel="validation accuracy, %")
    axes[1].set(title="our recipe before: Muon with weight decay, batches of 500")
    save(figure, "time_to_accuracy.svg", *names)


def main():
    with pyplot.rc_context(STYLE):
        died_and_healed()
        for path in sorted(RESULTS.glob("train_models-*.json")):
            curves(path.stem)
        safety()
        time_to_accuracy()


if __name__ == "__main__":
    main()
