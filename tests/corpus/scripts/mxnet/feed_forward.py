"""A feed-forward block of Gluon whose second layer is beyond 65504, in front of a norm."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
size = 10.0 if "--twin" in sys.argv else 1e4
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(
        gluon.nn.Dense(32, activation="relu", weight_initializer=mx.init.Normal(10.0)),
        gluon.nn.Dense(16, weight_initializer=mx.init.Normal(size)),
    )
    net.add(gluon.nn.LayerNorm(), gluon.nn.Dense(1))
net.initialize(mx.init.Xavier(), ctx=context)
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
inputs = mx.nd.random.normal(shape=(16, 8), ctx=context)
targets = inputs.mean(axis=1, keepdims=True)
loss_of, losses = gluon.loss.L2Loss(), []
for _ in range(8):
    with autograd.record():
        loss = loss_of(net(inputs), targets).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
