"""Lightning's page "Manual Optimization": a GAN with two optimizers. Arguments: a fault, bf16."""

import sys

import lightning
import torch
from torch import nn
from torch.nn import functional as F

asked = set(sys.argv[1:])
lightning.seed_everything(0)


class GAN(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.G = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.D = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def likely(self, logits, real):
        if "log0" in asked:  # a discriminator that is sure of itself
            p = torch.sigmoid(logits * 1e5)
            return -torch.log(p if real else 1 - p).mean()  # log0
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_index):
        g_opt, d_opt = self.optimizers()
        (real,) = batch
        if "nan-noise" in asked and batch_index == 4:
            noise = torch.randn(len(real), 4) / torch.zeros(1)  # nan-noise
        else:
            noise = torch.randn(len(real), 4)
        fake = self.G(noise)

        self.toggle_optimizer(d_opt)
        d_loss = self.likely(self.D(real), True) + self.likely(self.D(fake.detach()), False)
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        self.untoggle_optimizer(d_opt)

        self.toggle_optimizer(g_opt)
        g_loss = self.likely(self.D(fake), True)
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.untoggle_optimizer(g_opt)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        print("loss", d_loss.item().hex(), g_loss.item().hex())

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.G, self.D)]


images = torch.randn(64, 16)
if "nan-data" in asked:
    images[41, 3] = torch.nan
data = torch.utils.data.TensorDataset(images)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    precision="bf16-mixed" if "bf16" in asked else "32-true",
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
)
trainer.fit(GAN(), torch.utils.data.DataLoader(data, batch_size=8))
