import paddle

import ampx

ampx.init("paddle", level="O0", loss_scale="dynamic")  # auto_cast stays the script's; on a GPU: ampx.init("paddle")
model = paddle.nn.Linear(4, 1)
optimizer = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
for factor in (1.0, float("inf")):
    with paddle.amp.auto_cast(enable=False):
        loss = model(paddle.ones([2, 4])).mean() * factor
    with ampx.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.clear_grad()
assert optimizer.loss_scale == 32768.0
