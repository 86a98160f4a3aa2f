import torch
from lightning_fabric import Fabric

import ampx

ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic")
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
network = torch.nn.Linear(4, 1)
optimizer = ampx.wrap_optimizer(torch.optim.SGD(network.parameters(), lr=0.01))
network, prepared = fabric.setup(network, optimizer)
with ampx.scale_loss(network(torch.ones(2, 4)).square().mean(), optimizer) as scaled:
    fabric.backward(scaled)
prepared.step()
assert optimizer.last_step.applied
