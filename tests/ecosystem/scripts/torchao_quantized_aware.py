"""Quantization-aware training of torchao: weights and activations are rounded to integers in every forward."""

import json

import torch
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
losses = []
for _ in range(4):
    inputs = torch.randn(16, 64)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.mean(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
