"""A network without norms at a learning rate a thousand times too large: it explodes in float32 as well."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(1))
net.initialize(mx.init.Xavier(), ctx=context)
rate = 1e-3 if {"--twin", "--cure"} & {*sys.argv} else 5.0
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
inputs = mx.nd.random.normal(shape=(32, 8), ctx=context)
targets = inputs.sum(axis=1, keepdims=True)
loss_of, losses = gluon.loss.L2Loss(), []
for _ in range(12):
    with autograd.record():
        loss = loss_of(net(inputs), targets).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
