"""An MXNet script. A line with `# error` must be an error; every other line must be none."""

import mxnet as mx
from mxnet import autograd, gluon
from typing_extensions import assert_type

import ampx

ampx.init("mxnet", dtype="float16", loss_scale=128.0)
model = gluon.nn.Dense(1)
model.initialize()
trainer = ampx.wrap_optimizer(gluon.Trainer(model.collect_params(), "sgd"))
with autograd.record():
    loss = model(mx.nd.ones((2, 4))).mean()
    with ampx.scale_loss(loss, trainer) as scaled:
        pass
scaled.backward()
trainer.step(2)
assert_type(ampx.last_step(trainer), ampx.StepResult | None)
ampx.init("mxnet", loss_scale=None)  # error: no loss scale
print(ampx.StepResults)  # error: misspelt
