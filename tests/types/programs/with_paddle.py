"""A PaddlePaddle script. A line with `# error` must be an error; every other line must be none."""

import paddle
from typing_extensions import assert_type

import ampx

ampx.init("paddle", dtype="bf16")
model = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
optimizer = ampx.wrap_optimizer(optimizer, max_grad_value=1.0)
loss = paddle.mean(model(paddle.ones([2, 4])))
with ampx.scale_loss(loss, optimizer) as scaled:
    scaled.backward()
optimizer.step()
optimizer.clear_grad()
assert_type(ampx.last_step(optimizer), ampx.StepResult | None)
ampx.unscale()  # error: of which optimizer
ampx.init("paddle", nan_loss="ignore")  # error: none of its choices
