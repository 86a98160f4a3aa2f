"""A mean teacher that is stored in bfloat16: a step of a fiftieth towards the student is rounded away."""

import copy
import json
import sys

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
teacher = copy.deepcopy(student).requires_grad_(False)
if not {"--twin", "--cure"} & {*sys.argv}:
    teacher = teacher.to(torch.bfloat16)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
inputs, labels = torch.randn(32, 8), torch.randint(4, (32,))
losses = []
for _ in range(40):
    logits = student(inputs)
    with torch.no_grad():
        pseudo = teacher(inputs.to(teacher[0].weight.dtype)).float()
    agreement = nn.functional.mse_loss(logits.float(), pseudo)
    loss = nn.functional.cross_entropy(logits, labels) + 0.01 * agreement
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast.to(slow.dtype), 0.02)
    losses.append(agreement.item())
print(json.dumps(losses))
