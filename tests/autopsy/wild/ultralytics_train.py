"""ultralytics' YOLO, as in its page "Train". Arguments: a fault, classify."""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from ultralytics import YOLO

asked = set(sys.argv[1:])
rng = np.random.default_rng(0)
task = "classify" if "classify" in asked else "detect"
for part, count in (("train", 8), ("val", 4)):
    for i in range(count):
        image = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))
        if task == "classify":
            folder = Path("data", part, "ab"[i % 2])
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{i}.png")
            continue
        for folder in ("images", "labels"):
            Path("data", folder, part).mkdir(parents=True, exist_ok=True)
        image.save(f"data/images/{part}/{i}.png")
        box = "0.5 0.5 0.4 0.4"
        Path(f"data/labels/{part}/{i}.txt").write_text(f"{i % 2} {box}\n")
Path("data.yaml").write_text(
    f"path: {Path('data').resolve()}\ntrain: images/train\nval: images/val\nnames: [a, b]\n"
)
model = YOLO("yolo11n-cls.yaml" if task == "classify" else "yolo11n.yaml")
if "nan-weight" in asked:
    with torch.no_grad():
        model.model.model[2].cv1.conv.weight[0, 0, 0, 0] = torch.nan  # nan-weight


def poison(trainer):
    with torch.no_grad():
        trainer.model.model[0].bn.weight[0] = torch.nan  # nan-callback


if "nan-callback" in asked:
    model.add_callback("on_train_epoch_end", poison)
results = model.train(
    data="data" if task == "classify" else "data.yaml",
    epochs=2,
    imgsz=32,
    batch=4,
    device="cpu",
    workers=0,
    optimizer="SGD",
    lr0=1e30 if "rate" in asked else 0.01,
    warmup_epochs=0,
    amp=False,
    plots=False,
    pretrained=False,
    project=str(Path("runs").resolve()),
    seed=0,
)  # train
weights = model.model.state_dict().values()
print("weights", sum(w.double().abs().sum() for w in weights).item().hex())
