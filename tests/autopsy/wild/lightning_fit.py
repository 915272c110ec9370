"""Lightning's Trainer, as in its page "Lightning in 15 minutes". Arguments: a fault, bf16,
accumulate, compile."""

import sys

import lightning
import torch
from torch import nn
from torch.nn import functional as F

asked = set(sys.argv[1:])
lightning.seed_everything(0)


class AutoEncoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.mean = nn.Linear(32, 3)
        self.spread = nn.Linear(32, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch, batch_index):
        x, _ = batch
        x = x.view(x.size(0), -1)
        h = self.encoder(x)  # encoder
        mean = self.mean(h)
        spread = self.spread(h)

        if "exp" in asked:  # a KL term whose variance was never bounded
            kl = (mean.square() + torch.exp(1e3 * spread) - spread - 1).mean()  # exp
        elif "bf16-log" in asked:
            kl = -torch.log(1 - torch.sigmoid(10 * torch.tanh(3 * spread))).mean()  # bf16-log
        else:
            kl = (mean.square() + torch.exp(spread) - spread - 1).mean()

        x_hat = self.decoder(mean)
        loss = F.mse_loss(x_hat, x) + 0.01 * kl  # loss
        if "log0" in asked and batch_index >= 5:
            loss = loss - torch.log(torch.relu(x_hat - 1e3)).mean()  # log0

        self.log("train_loss", loss)
        print("loss", loss.item().hex())
        return loss

    def validation_step(self, batch, batch_index):
        x = batch[0].flatten(1)
        mean = self.mean(self.encoder(x))
        x_hat = self.decoder(mean)
        self.log("val_loss", F.mse_loss(x_hat, x))

    def configure_optimizers(self):
        rate = 1e15 if "rate" in asked else 1e-3
        optimizer = torch.optim.Adam(self.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [scheduler]


images = torch.rand(96, 1, 8, 8)
if "nan-data" in asked:
    images[41, 0, 2, 3] = float("nan")
data = torch.utils.data.TensorDataset(images, torch.zeros(96))

model = AutoEncoder()
if "compile" in asked:
    model = torch.compile(model, backend="aot_eager")

trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    precision="bf16-mixed" if "bf16" in asked else "32-true",
    accumulate_grad_batches=2 if "accumulate" in asked else 1,
    gradient_clip_val=1.0,
    default_root_dir="saved",
    logger=False,
    enable_progress_bar=False,
)
validation = torch.utils.data.Subset(data, range(16))
trainer.fit(
    model,
    torch.utils.data.DataLoader(data, batch_size=8),
    torch.utils.data.DataLoader(validation, batch_size=8),
)  # train
weights = sum(p.double().abs().sum() for p in model.parameters())
print("weights", weights.item().hex())
