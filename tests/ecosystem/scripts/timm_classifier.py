"""A tiny vision transformer of timm: its loss, its optimizer, its schedule, its EMA and its mixing of images."""

import json

import cpu_torchvision  # noqa: F401 -- before whatever imports torchvision
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=4
)
optimizer = create_optimizer_v2(model, "adamw", lr=0.001, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=8, warmup_t=1)
average, mix = ModelEmaV3(model, decay=0.9), Mixup(mixup_alpha=0.2, num_classes=4)
losses = []
for step in range(4):
    images, targets = mix(torch.randn(4, 3, 32, 32), torch.randint(4, (4,)))
    loss = SoftTargetCrossEntropy()(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step(step + 1)
    average.update(model, step)
    losses.append(loss.item())
print(json.dumps(losses))
