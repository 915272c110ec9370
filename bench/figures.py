"""
The README's pictures, drawn from the raw files in bench/results:  python bench/figures.py   (needs matplotlib)

Transparent SVG with grey text, so that they read on a light page and on a dark one.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).resolve().parent / "results"
FIGURES = Path(__file__).resolve().parent / "figures"
GREY, RED, BLUE, ORANGE = "#8b949e", "#e5534b", "#4184e4", "#cc8a1e"
STYLE = {"text.color": GREY, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
         "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "finite", "legend.frameon": False,
         "font.size": 10, "savefig.transparent": True}


def save(figure, name):
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / name, metadata={"Date": None})
    pyplot.close(figure)
    print(FIGURES / name)


def smooth(losses, window=10):
    """Mean of the finite losses among the last `window`; None where there are none, so that a dead run leaves a gap."""
    out = []
    for i in range(len(losses)):
        some = [loss for loss in losses[max(0, i - window + 1) : i + 1] if loss is not None]
        out.append(sum(some) / len(some) if some and losses[i] is not None else float("nan"))
    return out


def died_and_healed(run):
    """Left, the losses, with every step that the stock loop lost; right, the loss scale at which it ended."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2), width_ratios=(2, 1), layout="constrained")
    steps = range(1, len(run["died"]) + 1)
    lost = [step for step, loss in zip(steps, run["died"], strict=True) if loss is None]
    cures = [event for event in run["events"] if event["event"] == "cure"]
    left.plot(steps, smooth(run["healed"]), color=BLUE, label="train.py", linewidth=1.8)
    left.plot(steps, smooth(run["died"]), color=ORANGE, label="stock AMP loop", linewidth=1.4)
    bottom = min(filter(None, run["healed"])) - 0.25
    left.plot(lost, [bottom] * len(lost), "|", color=RED, markersize=9, label=f"stock: loss is NaN ({len(lost)} steps)")
    for cure in cures:
        height = smooth(run["healed"])[cure["step"]]
        left.annotate(f"step {cure['step']}: {cure['module']}\nis kept in fp32 from now on", (cure["step"], height),
                      (cure["step"] - 20, bottom + 0.25), color=BLUE,
                      arrowprops={"arrowstyle": "->", "color": BLUE})
    left.set(xlabel="step", ylabel="training loss", ylim=(bottom - 0.05, max(filter(None, run["died"])) + 0.12))
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.17), ncols=3)
    right.plot(steps, run["healed_scales"], color=BLUE, linewidth=1.8)
    right.plot(steps, run["died_scales"], color=ORANGE, linewidth=1.4)
    right.set(yscale="log", xlabel="step", ylabel="loss scale")
    save(figure, "died_and_healed.svg")


def curves(runs, name):
    """Training loss of every model, bf16 over fp32, one line a seed."""
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
            axis.plot(*zip(*run["curve"], strict=True), color=ORANGE if bf16 else BLUE, linewidth=1.1,
                      label=run["precision"] if run["seed"] == 0 else None, alpha=0.9)
        axis.set_title(model, color=GREY, fontsize=10)
        if model in ("dit", "slat_vae"):
            axis.set_yscale("log")
    axes.flat[0].legend()
    save(figure, name)


def main():
    with pyplot.rc_context(STYLE):
        died_and_healed(json.loads((RESULTS / "died_and_healed-cpu.json").read_text()))
        for path in sorted(RESULTS.glob("train_models-*.json")):
            curves(json.loads(path.read_text())["runs"], f"{path.stem}.svg")


if __name__ == "__main__":
    main()
