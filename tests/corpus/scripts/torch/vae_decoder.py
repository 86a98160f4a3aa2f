"""A decoder of diffusers whose residual convolution is beyond 65504, as that of SDXL's published weights in float16."""

import json
import sys

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

torch.manual_seed(0)
model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8)
with torch.no_grad():
    model.decoder.mid_block.resnets[0].conv2.weight.mul_(1e2 if "--twin" in sys.argv else 4e5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.rand(2, 3, 8, 8)
losses = []
for _ in range(6):
    restored = model(images).sample
    loss = torch.nn.functional.mse_loss(restored, images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
