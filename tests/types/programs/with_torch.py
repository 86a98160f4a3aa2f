"""A PyTorch script. A line with `# error` must be an error; every other line must be none."""

import torch
from torch import nn
from typing_extensions import assert_type

import ampx

amp = ampx.init("torch", dtype="float16", level="O2", loss_scale=ampx.LossScale(init_scale=8.0))
assert_type(amp, ampx.Amp)
assert_type(ampx.__version__, str)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer = ampx.wrap_optimizer(optimizer, max_grad_norm=1.0)
assert_type(optimizer.last_step, ampx.StepResult | None)
assert_type(optimizer.loss_scale, float)
scheduler = ampx.gate(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer)


def train(native: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """Take the wrapped optimizer as the native one."""
    with ampx.scale_loss(loss, native) as scaled:
        assert_type(scaled, torch.Tensor)
        scaled.backward()
    native.step()
    native.zero_grad(set_to_none=True)
    return scaled


loss = model(torch.ones(2, 4)).sum()
train(optimizer, loss)
with ampx.scale_loss([loss, loss], optimizer) as both, ampx.autocast(dtype=torch.bfloat16):
    both[0].backward()
result = amp.last_step(optimizer)
assert_type(result, ampx.StepResult | None)
print(result.applied)  # error: it may be None
if result is not None:
    assert_type(result.applied, bool)
    print(result.aplied)  # error: misspelt
several = ampx.wrap_optimizer([optimizer, optimizer])
print(several[0].last_step)
ampx.scael_loss(loss, optimizer)  # error: misspelt
ampx.wrap_optimizer("adam")  # error: no optimizer
ampx.wrap_optimizer(model)  # error: no optimizer
ampx.init("torch", dtype="float61")  # error: no dtype
ampx.init("torch", level="O4")  # error: no level
ampx.init("torch", on_unsupported="ignore")  # error: neither "raise" nor "warn"
ampx.init("torch", loss_scale="static")  # error: no loss scale
ampx.init("torch", levle="O1")  # error: misspelt
ampx.init("autograd", dtype=torch.float16)
