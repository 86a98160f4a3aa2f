"""Min-SNR weights and a schedule that ends in pure noise: its last timestep divides 0 by 0, in float32 as well."""

import json
import sys

import torch
from diffusers import DDIMScheduler, UNet2DModel
from diffusers.training_utils import compute_snr

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    block_out_channels=(8, 16),
    layers_per_block=1,
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
)
rescale = "--twin" not in sys.argv
scheduler = DDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=rescale)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.randn(4, 3, 8, 8).clamp(-1, 1)
timesteps = torch.randint(0, 999, (14, 4))
timesteps[6, 2] = 999
losses = []
for step in range(14):
    noise = torch.randn_like(images)
    noisy = scheduler.add_noise(images, noise, timesteps[step])
    target = scheduler.get_velocity(images, noise, timesteps[step])
    snr = compute_snr(scheduler, timesteps[step])
    divisor = snr + 1 if "--cure" in sys.argv else snr
    weights = snr.clamp(max=5.0) / divisor
    errors = (model(noisy, timesteps[step]).sample.float() - target) ** 2
    loss = (weights * errors.mean((1, 2, 3))).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
