"""diffusers' tutorial "Train a diffusion model", with accelerate and EMAModel. Arguments: a fault,
bf16, accumulate."""

import sys

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel, compute_snr
from torch.nn import functional as F

asked = set(sys.argv[1:])
torch.manual_seed(0)
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16" if "bf16" in asked else "no",
    gradient_accumulation_steps=2 if "accumulate" in asked else 1,
)
model = UNet2DModel(
    sample_size=8,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
images = torch.rand(48, 3, 8, 8) * 2 - 1
if "nan-data" in asked:
    images[22, 1, 5, 5] = float("nan")
loader = torch.utils.data.DataLoader(images, batch_size=8)
noise_scheduler = DDPMScheduler(
    num_train_timesteps=1000,
    beta_schedule="squaredcos_cap_v2",
    prediction_type="v_prediction" if "snr" in asked else "epsilon",
    rescale_betas_zero_snr="snr" in asked,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e15 if "rate" in asked else 1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 0 if "rate" in asked else 2, 12)
ema = EMAModel(model.parameters())
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for _ in range(2):
    for clean in loader:
        noise = torch.randn(clean.shape)
        steps = torch.randint(0, 1000, (clean.shape[0],), dtype=torch.int64)
        if "snr" in asked:
            steps[3] = 999  # the last step has no signal, and snr is 0
        noisy = noise_scheduler.add_noise(clean, noise, steps)  # noisy
        with accelerator.accumulate(model):
            predicted = model(noisy, steps, return_dict=False)[0]
            if "snr" in asked:  # min-SNR weights as in diffusers' own examples
                snr = compute_snr(noise_scheduler, steps)
                weights = torch.stack([snr, 5.0 * torch.ones_like(steps)], 1).min(1)[0] / snr  # snr
                loss = F.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3)) * weights
                loss = loss.mean()
            else:
                loss = F.mse_loss(predicted, noise)  # loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        ema.step(model.parameters())
        print("loss", loss.detach().item().hex())
