import torch

import ampx

amp = ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic", level="O2")  # on a GPU: dtype="float16"
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = ampx.prepare(model, optimizer)
optimizer = ampx.wrap_optimizer(optimizer)
for factor in (1.0, float("inf")):
    loss = model(torch.ones(2, 4)).square().mean() * factor
    with ampx.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    ampx.clip_grad_norm(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()
assert not optimizer.last_step.applied
assert model.weight.dtype == torch.bfloat16
amp.load_state_dict(ampx.import_state(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()))
assert optimizer.loss_scale == 8.0
