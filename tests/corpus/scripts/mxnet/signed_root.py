"""Bilinear pooling with a signed square root: its epsilon of 1e-12 is zero in float16, and the root's gradient NaN."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon


class BilinearPooling(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        features = F.reshape(x, (0, 0, -1))
        products = F.batch_dot(features, features, transpose_b=True) / 36
        epsilon = 1e-3 if {"--cure", "--twin"} & {*sys.argv} else 1e-12
        return F.flatten(F.sign(products) * F.sqrt(F.abs(products) + epsilon))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Conv2D(16, 3, bias_initializer=mx.init.Constant(-0.5)), gluon.nn.Activation("relu"))
    net.add(BilinearPooling(), gluon.nn.Dense(4))
net.initialize(mx.init.Xavier(), ctx=context)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
birds, species = mx.nd.random.normal(shape=(8, 3, 8, 8), ctx=context), mx.nd.arange(8, ctx=context) % 4
loss_of, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
for _ in range(12):
    with autograd.record():
        loss = loss_of(net(birds), species).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
