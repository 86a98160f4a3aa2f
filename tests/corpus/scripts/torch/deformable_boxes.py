"""Logits of boxes as in Deformable DETR: a coordinate of 0.99993 is 1 in float16, and 1 / 1e-5 is beyond 65504.

The twin returns the sigmoid of its logits, as the decoder does: that of the same inf is 1, and no harm is done.
"""

import json
import sys

import torch
from torch import nn
from transformers.models.deformable_detr.modeling_deformable_detr import inverse_sigmoid


class Refine(nn.Module):
    def __init__(self):
        super().__init__()
        self.reference, self.offset = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, queries):
        reference = self.reference(queries).sigmoid()
        logits = inverse_sigmoid(reference) + self.offset(queries)
        return logits.sigmoid() if "--twin" in sys.argv else logits


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Refine())
with torch.no_grad():
    model[2].reference.bias.copy_(torch.tensor([0.0, 0.0, 2.0, 9.5]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
queries, boxes = torch.randn(16, 8), 0.1 + 0.8 * torch.rand(16, 4)
losses = []
for _ in range(10):
    loss = nn.functional.l1_loss(model(queries).float(), boxes if "--twin" in sys.argv else torch.logit(boxes))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
print(json.dumps(losses))
