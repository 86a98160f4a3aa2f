"""A residual block of Gluon's model zoo whose convolution is beyond 65504, in front of a norm of its batch."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo.vision.resnet import BasicBlockV1

mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Conv2D(4, 3), BasicBlockV1(4, 1, in_channels=4), gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(3))
net.initialize(mx.init.Xavier(), ctx=context)
images, labels = mx.nd.random.normal(shape=(6, 1, 8, 8), ctx=context), mx.nd.arange(6, ctx=context) % 3
net(images)
gamma, weight = net[1].body[1].gamma, net[1].body[3].weight
gamma.set_data(gamma.data() * 20)
weight.set_data(weight.data() * (10.0 if "--twin" in sys.argv else 2e4))
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
loss_of, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
for _ in range(8):
    with autograd.record():
        loss = loss_of(net(images), labels).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
