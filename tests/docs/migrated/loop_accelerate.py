import torch
from accelerate import Accelerator

import ampx

ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic")
accelerator = Accelerator(mixed_precision="no", cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
model, prepared = accelerator.prepare(model, optimizer)
for factor in (1.0, float("inf")):
    loss = model(torch.ones(2, 4)).square().mean() * factor
    with ampx.scale_loss(loss, optimizer) as scaled:
        accelerator.backward(scaled)
    prepared.step()
    prepared.zero_grad()
assert optimizer.loss_scale == 32768.0
assert not optimizer.last_step.applied
