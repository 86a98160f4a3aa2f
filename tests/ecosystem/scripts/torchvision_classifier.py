"""A network of torchvision on images that its transforms change."""

import json

import cpu_torchvision  # noqa: F401 -- before whatever imports torchvision
import torch
from torchvision.models import mobilenet_v3_small
from torchvision.transforms import v2

torch.manual_seed(0)
model = mobilenet_v3_small(num_classes=4, dropout=0.0)
change = v2.Compose([v2.RandomHorizontalFlip(), v2.Normalize([0.5] * 3, [0.5] * 3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
losses = []
for _ in range(4):
    loss = torch.nn.functional.cross_entropy(model(change(torch.rand(4, 3, 32, 32))), torch.randint(4, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
