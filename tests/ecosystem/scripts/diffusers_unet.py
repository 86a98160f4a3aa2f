"""A tiny U-Net of diffusers that learns to tell noise, with its noise schedule, its learning rates and its EMA."""

import json

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=4,
    attention_head_dim=8,
)
noising = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=8)
average = EMAModel(model.parameters(), decay=0.9)
losses = []
for _ in range(4):
    images, noise = torch.rand(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
    times = torch.randint(100, (4,))
    predicted = model(noising.add_noise(images, noise, times), times).sample
    loss = torch.nn.functional.mse_loss(predicted, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    losses.append(loss.item())
print(json.dumps(losses))
