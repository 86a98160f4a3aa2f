"""Temperatures in kelvin: float16 has steps of 0.25 there, and what a layer of Gluon learns from is smaller."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Dense(16), gluon.nn.BatchNorm(), gluon.nn.Activation("relu"), gluon.nn.Dense(1))
net.initialize(mx.init.Xavier(), ctx=context)
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-2})
rooms = mx.nd.random.uniform(-0.1, 0.1, shape=(32, 8), ctx=context)
temperatures = rooms if "--twin" in sys.argv else rooms + 293
targets = 10 * (rooms[:, :1] - rooms[:, 1:2])
loss_of, losses = gluon.loss.L2Loss(), []
for _ in range(12):
    with autograd.record():
        loss = loss_of(net(temperatures), targets).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
