"""Gradients are summed over four parts of a batch, with grad_req "add", and never put to zero: float32 diverges."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

PARTS = 1 if "--twin" in sys.argv else 4  # the twin's batch fits as a whole, and needs no sum


def encoder():
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Conv1D(16, 5, padding=2, activation="relu"), gluon.nn.Conv1D(16, 5, strides=4))
        net.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(1))
    return net


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = encoder()
net.initialize(mx.init.Xavier(), ctx=context)
if PARTS > 1:
    net.collect_params().setattr("grad_req", "add")
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
signals = mx.nd.random.normal(shape=(32, 2, 40), ctx=context)
targets = signals[:, 0, ::4].sum(axis=1).expand_dims(1)
loss_of, losses = gluon.loss.L2Loss(), []
for _ in range(26):
    total = 0
    for part in range(PARTS):
        chosen = slice(part * 32 // PARTS, (part + 1) * 32 // PARTS)
        with autograd.record():
            loss = loss_of(net(signals[chosen]), targets[chosen])
        loss.backward()
        total += float(loss.mean().asscalar()) / PARTS
    trainer.step(32)
    if "--cure" in sys.argv:
        net.collect_params().zero_grad()
    losses.append(total)
print(json.dumps(losses))
