"""Weight decay times learning rate is 4: weights grow threefold and change sign in every step, in float32 as well."""

import json
import sys

import torch
from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))
decay = 0.01 if {"--twin", "--cure"} & {*sys.argv} else 400.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=decay)
images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
losses = []
for _ in range(14):
    loss = model(pixel_values=images, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
