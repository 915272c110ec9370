"""
Does the diffusion model draw what it is asked for? A classifier of this repository looks at its
samples.

    python bench/recognised.py --data-dir DIR --dit runs/cifar10-dit-auto-0 --judge
    runs/cifar10-resnet18-auto-0

1,000 samples, 100 of each class, for each guidance. The figure is the share of samples for which
the judge names the class that was asked for; chance is 10 %. The judge's own accuracy on as many
real validation images stands beside it: no model that draws perfectly could be recognised more
often. Both nets are read from the best.pt of their runs. The first 40 samples of each guidance, a
column for each class, become a picture in bench/results/trained.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torchvision.utils import save_image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
from bench import record  # noqa: E402
from data.batches import Normalize  # noqa: E402
from models import MODELS  # noqa: E402


def load(name, folder, classes):
    """A net of the table with the weights of a run's best.pt, in evaluation mode."""
    net = MODELS[name][0](classes, 32)
    net.load_state_dict(torch.load(folder / "best.pt", map_location="cpu", weights_only=True))
    return net.eval()


@torch.no_grad()
def recognised(judge, images, labels):
    """Percent of images (N, 3, H, W) that the judge gives their label; and that of each class."""
    guesses = torch.cat([judge(some).argmax(1) for some in images.split(250)])
    hits = (guesses == labels).float() * 100
    classes = range(int(labels.max()) + 1)
    return hits.mean().item(), [round(hits[labels == c].mean().item(), 1) for c in classes]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument(
        "--dit", type=Path, required=True, help="folder of a run with the diffusion model"
    )
    parser.add_argument(
        "--judge", type=Path, required=True, help="folder of a run with the classifier"
    )
    parser.add_argument("--dit-model", default="dit")
    parser.add_argument("--judge-model", default="resnet18")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", nargs="+", type=float, default=[1.0, 2.0, 4.0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    loaded = data.load("cifar10", args.data_dir)
    images, truth = loaded.val
    classes = loaded.classes
    normalize = Normalize(loaded.mean, loaded.std)
    labels = torch.arange(args.samples) % len(classes)
    dit = load(args.dit_model, args.dit, classes)
    judge = load(args.judge_model, args.judge, classes)
    index = torch.linspace(0, len(truth) - 1, args.samples).long()
    real, by_class = recognised(judge, normalize(images[index]), truth[index])
    rows = {
        "real images": {"recognised": real, "by class": dict(zip(classes, by_class, strict=True))}
    }
    for guidance in args.guidance:
        began = time.time()
        samples = torch.cat(
            [
                dit.sample(some, steps=args.steps, guidance=guidance, seed=i)
                # args.samples, 3, 32, 32
                for i, some in enumerate(labels.split(100))
            ]
        )
        args.results.joinpath("trained").mkdir(parents=True, exist_ok=True)
        save_image(
            (samples[:40] * normalize.std + normalize.mean) / 255,
            nrow=len(classes),
            padding=1,
            fp=args.results / "trained" / f"cifar10-dit-guidance-{guidance:g}.png",
        )
        share, by_class = recognised(judge, samples, labels)
        rows[f"guidance {guidance:g}"] = {
            "recognised": share,
            "by class": dict(zip(classes, by_class, strict=True)),
            "seconds": round(time.time() - began, 1),
        }
    for name, row in rows.items():
        print(
            f"{name:<14}{row['recognised']:>7.1f} %   "
            + ", ".join(f"{c} {share:.0f}" for c, share in row["by class"].items())
        )
    record.write(
        record.header("recognised", vars(args), torch.device("cpu")) | {"rows": rows},
        args.results,
        torch.device("cpu"),
    )


if __name__ == "__main__":
    main()
