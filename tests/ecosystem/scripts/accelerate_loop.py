"""A loop of Accelerate: prepare, accumulate, clip, gather."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
inputs = torch.randn(32, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.mean(1, keepdim=True)), 4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for batch, target in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss).mean().item())
accelerator.print(json.dumps(losses))
