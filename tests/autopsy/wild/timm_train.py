"""timm's training script in short: create_model, create_optimizer_v2, create_scheduler_v2, Mixup,
ModelEmaV3, NativeScaler. Arguments: a fault, bf16, resnet, mixup."""

import sys

import timm
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, random_seed

asked = set(sys.argv[1:])
random_seed(0)
if "resnet" in asked:
    model = timm.create_model("resnet10t", num_classes=4)
else:
    small = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **small)
kind = "lamb" if "resnet" in asked else "adamw"
optimizer = create_optimizer_v2(model, opt=kind, lr=1e15 if "rate" in asked else 1e-3)
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2)
ema = ModelEmaV3(model, decay=0.99)
scaler = NativeScaler(device="cpu") if "scaler" in asked else None
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4) if "mixup" in asked else None
loss_of = SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(smoothing=0.1)

images, targets = torch.randn(48, 3, 32, 32), torch.arange(48) % 4
if "nan-data" in asked:
    images[22, 1, 5, 5] = float("nan")
if "label-range" in asked:
    targets[22] = 4
data = torch.utils.data.TensorDataset(images, targets)
loader = torch.utils.data.DataLoader(data, batch_size=8)


def train_one_epoch(epoch):
    model.train()
    losses = AverageMeter()
    for x, y in loader:
        if mixup:
            x, y = mixup(x, y)
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in asked):
            output = model(x)  # model
            if "cosine" in asked:  # an angle to a class that has no direction yet
                unit = output * 0 / (output * 0).norm(dim=-1, keepdim=True)  # cosine
                output = output + unit
            loss = loss_of(output, y)  # loss
        optimizer.zero_grad()
        if scaler:
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ema.update(model)
        losses.update(loss.item(), x.size(0))
    print("loss", losses.avg.hex())


for epoch in range(2):
    train_one_epoch(epoch)
    scheduler.step(epoch + 1)
