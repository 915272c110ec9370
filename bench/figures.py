"""
The pictures, drawn from the raw files in bench/results:  python bench/figures.py   (matplotlib)

Transparent SVG with grey text, so that they read on a light page and on a dark one. Each says in
its metadata from which raw files it was drawn, with their SHA-256 (tests/test_readme.py compares).
"""

import hashlib
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = Path(__file__).resolve().parent / "figures"
GREY, RED, BLUE = "#768390", "#e5534b", "#4184e4"  # seen on white and on black
ORANGE, GREEN = "#cc8a1e", "#46954a"
STYLE = {
    "text.color": GREY, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "axes.titlecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 10, "svg.hashsalt": "finite", "legend.frameon": False, "font.size": 10,
    "savefig.transparent": True,
}  # fmt: skip


def raw(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def save(figure, name, *sources):
    """One SVG; `sources`: the raw files it was drawn from, without their .json."""
    FIGURES.mkdir(exist_ok=True)
    files = [RESULTS / f"{source}.json" for source in sources]
    sums = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    figure.savefig(FIGURES / name, metadata={"Date": None, "Source": ", ".join(sums)})
    pyplot.close(figure)
    print(FIGURES / name)


def smooth(losses, window=10):
    """The mean of the finite losses among the last `window`; at a lost step NaN, a gap."""
    means = []
    for i, loss in enumerate(losses):
        recent = losses[max(0, i - window + 1) : i + 1]
        finite = [value for value in recent if value is not None]
        means.append(float("nan") if loss is None else statistics.mean(finite))
    return means


def died_and_healed():
    """Left the losses, with every step that the stock loop lost; right the loss scale."""
    run = raw("died_and_healed-cpu")
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(6.4, 3.2), width_ratios=(3, 2), layout="constrained"
    )
    steps = range(1, len(run["died"]) + 1)
    lost = [step for step, loss in zip(steps, run["died"], strict=True) if loss is None]
    healed = smooth(run["healed"])
    bottom = min(filter(None, run["healed"])) - 0.25
    left.plot(steps, healed, color=BLUE, label="train.py", linewidth=1.8)
    left.plot(steps, smooth(run["died"]), color=ORANGE, label="stock AMP loop", linewidth=1.4)
    left.plot(
        lost,
        [bottom] * len(lost),
        "|",
        color=RED,
        markersize=9,
        label=f"its steps lost to NaN ({len(lost)})",
    )
    for cure in [event for event in run["events"] if event["event"] == "cure"]:
        text = f"step {cure['step']}: {cure['module']}\nis kept in fp32 from now on"
        point = cure["step"] + 1, healed[cure["step"]]  # the step after has a loss
        left.annotate(
            text,
            point,
            (cure["step"] - 20, bottom + 0.2),
            color=BLUE,
            arrowprops={"arrowstyle": "->", "color": BLUE},
        )
    left.set(
        xlabel="step",
        ylabel="training loss (mean of 10)",
        ylim=(bottom - 0.05, max(filter(None, run["died"])) + 0.12),
    )
    figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2)
    for scales, colour in ((run["healed_scales"], BLUE), (run["died_scales"], ORANGE)):
        right.plot(steps, scales, color=colour, linewidth=1.6)
        right.annotate(
            f"ends at {scales[-1]:.1g}",
            (len(steps), scales[-1]),
            (-4, -12),
            textcoords="offset points",
            color=colour,
            ha="right",
        )
    lowest = run["died_scales"][-1] / 1e5  # room for its label
    right.set(yscale="log", xlabel="step", ylabel="loss scale", ylim=(lowest, None))
    save(figure, "died_and_healed.svg", "died_and_healed-cpu")


def stock_and_guarded():
    """One bad batch in two loops: the stock loop trains on, and its evaluation is NaN."""
    run = raw("stock_and_guarded-cpu")
    stock, guarded = run["stock"], run["guarded"]
    figure, axis = pyplot.subplots(figsize=(4.4, 3.2), layout="constrained")
    curves = (
        (guarded["evaluation"], BLUE, 3.0, "guarded loop: evaluation"),
        (stock["evaluation"], ORANGE, 1.4, "stock AMP loop: evaluation"),
        (stock["train"], ORANGE, 0.8, "stock AMP loop: training"),
    )
    for curve, colour, width, label in curves:
        losses = [float("nan") if x is None else x for x in curve]
        style = "--" if curve is stock["train"] else "-"
        axis.plot(
            range(1, len(losses) + 1), losses, style, color=colour, linewidth=width, label=label
        )
    axis.axvline(run["bad step"], color=GREY, linewidth=0.8, linestyle=":")
    lost = [step for step, x in enumerate(stock["evaluation"], 1) if x is None]
    bottom = min(filter(None, guarded["evaluation"])) / 2
    axis.plot(lost, [bottom] * len(lost), "|", color=RED, markersize=9)
    axis.text(
        lost[0] - 1, bottom, f"stock: NaN from step {lost[0]}", color=RED, ha="right", va="center"
    )
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    figure.legend(loc="outside upper left", ncols=1)
    save(figure, "stock_and_guarded.svg", "stock_and_guarded-cpu")


def guard_cost():
    """Guarded step / bare step, median and quartiles; beside it PyTorch's own recipe."""
    names = "guard_cost-cpu", "guard_cost-cuda"
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharex=True)
    ways = (
        ("ours", "guarded / bare", BLUE, "o", -0.2),
        ("stock AMP recipe (clip)", "stock AMP recipe / bare", ORANGE, "s", 0.05),
        ("ours, CUDA graph", "guarded / bare, both CUDA graphs", GREEN, "D", 0.3),
    )
    for axis, record in zip(axes, map(raw, names), strict=True):
        rows = [
            (title.removesuffix(", bfloat16"), cells)
            for title, cells in record["ratios"].items()
            if title.endswith(", bfloat16")
        ]
        for way, label, colour, marker, down in ways:
            drawn = [(i + down, cells[way]) for i, (_, cells) in enumerate(rows) if way in cells]
            for place, cell in drawn:
                axis.hlines(place, *cell["quartiles"], color=colour, linewidth=1.4)
            axis.plot(
                [cell["median"] for _, cell in drawn],
                [place for place, _ in drawn],
                marker,
                color=colour,
                markersize=5,
                label=label,
            )
        axis.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--")
        axis.set(
            title=record["hardware"],
            yticks=range(len(rows)),
            yticklabels=[title for title, _ in rows],
            xlabel="time of a training step, bare = 1",
        )
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, "guard_cost.svg", *names)


def time_to_accuracy():
    """Validation accuracy of every seed over seconds of training, ours beside the peer."""
    record = raw("time_to_accuracy_airbench-cpu")
    figure, axis = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    lines = zip(record["curves"].items(), (BLUE, ORANGE), (0.16, 0.05), strict=True)
    for (who, seeds), colour, height in lines:
        for seed in seeds:  # a point: epochs, seconds, plain, with augmentation
            axis.plot([point[1] for point in seed], [point[2] for point in seed], color=colour)
        seconds, accuracy = (statistics.mean(seed[-1][i] for seed in seeds) for i in (1, 2))
        text = f"{who}, {seeds[0][-1][0]:g} epochs: {accuracy:.1f} % after {seconds:.3g} s"
        axis.text(0.98, height, text, color=colour, ha="right", transform=axis.transAxes)
    axis.set(
        xlabel=f"seconds of training, two CPU cores; {len(seeds)} seeds each",
        ylabel="validation accuracy, %",
        xlim=(0, None),
    )
    save(figure, "time_to_accuracy.svg", "time_to_accuracy_airbench-cpu")


def main():
    with pyplot.rc_context(STYLE):
        stock_and_guarded()
        died_and_healed()
        guard_cost()
        time_to_accuracy()


if __name__ == "__main__":
    main()
