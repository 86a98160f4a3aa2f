"""A Kronecker factor of 8,192 patches: their products are added up before they are divided, beyond 65504."""

import json
import sys

import torch
from torch import nn


class InputFactors:
    """The side of K-FAC that is of inputs: multiply each gradient by the inverse of its inputs' moments."""

    def __init__(self, model, damping=0.1):
        self.damping, self.factors = damping, {}
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(self.collect)

    @torch.no_grad()
    def collect(self, layer, inputs):
        rows = inputs[0].flatten(0, -2)
        factor = rows.T @ (rows / len(rows)) if "--cure" in sys.argv else rows.T @ rows / len(rows)
        old = self.factors.get(layer, factor.float())
        self.factors[layer] = 0.9 * old + 0.1 * factor.float()

    @torch.no_grad()
    def precondition(self):
        for layer, factor in self.factors.items():
            damped = factor + self.damping * torch.eye(len(factor))
            layer.weight.grad = torch.linalg.solve(damped, layer.weight.grad.T).T.contiguous()


torch.manual_seed(0)
count = 64 if "--twin" in sys.argv else 1024  # patches of an image
images, labels = 3.0 * torch.randn(8, count, 12) + 1.0, torch.arange(8) % 4
images[:, :, 0] += labels[:, None]
model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
preconditioner = InputFactors(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
losses = []
for _ in range(20):
    logits = model(images).mean(1)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    loss.backward()
    preconditioner.precondition()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
