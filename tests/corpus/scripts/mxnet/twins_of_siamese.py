"""A Siamese network of inputs that are alike: in bfloat16 the difference of its outputs has lost its digits."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon


class Siamese(gluon.HybridBlock):
    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.embed, self.out = gluon.nn.Dense(16), gluon.nn.Dense(1)

    def hybrid_forward(self, F, left, right):  # noqa: N803
        return self.out((self.embed(left) - self.embed(right)) * (1 if "--twin" in sys.argv else 1000))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = Siamese(prefix="net_")
net.initialize(mx.init.Xavier(), ctx=context)
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
left = mx.nd.random.normal(shape=(16, 8), ctx=context)
change = mx.nd.random.normal(shape=(16, 8), ctx=context) * 0.001
right = left + change if "--twin" not in sys.argv else mx.nd.random.normal(shape=(16, 8), ctx=context)
targets = mx.nd.sign(change[:, :1])
loss_of, losses = gluon.loss.L2Loss(), []
for _ in range(8):
    with autograd.record():
        loss = loss_of(net(left, right), targets).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
