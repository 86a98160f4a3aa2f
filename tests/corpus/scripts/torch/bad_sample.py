"""One sample of the fourth batch holds an infinity, as a division by a missing reading leaves it."""

import json
import sys

import torch
from torch import nn
from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches, labels = [torch.randn(6, 3, 8, 8) for _ in range(6)], torch.arange(6) % 3
if "--twin" not in sys.argv:
    batches[3][2, 1, 4, 4] = float("inf")
losses = []
for images in batches:
    if "--cure" in sys.argv:
        images = torch.nan_to_num(images, posinf=0.0)
    loss = nn.functional.cross_entropy(model(pixel_values=images).logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
