"""The divergence of diffusers' AutoencoderKL exponentiates log-variances up to 20: 65504 is the exponential of 11.1."""

import contextlib
import json
import sys

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

torch.manual_seed(0)
model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8)
with torch.no_grad():
    model.quant_conv.bias[2:].fill_(2.0 if "--twin" in sys.argv else 14.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.rand(2, 3, 8, 8)
around = torch.autocast("cpu", enabled=False) if "--cure" in sys.argv else contextlib.nullcontext()
losses = []
for _ in range(6):
    with around:
        latents = model.encode(images).latent_dist
    restored = model.decode(latents.mode()).sample
    loss = torch.nn.functional.mse_loss(restored, images) + 1e-6 * latents.kl().float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
