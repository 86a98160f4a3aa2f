"""A focal loss of a wrong label: the chance of e^-17 is 0 in float16, and the slope of its logarithm beyond 65504."""

import json
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon


class Features(gluon.HybridBlock):
    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.first, self.second = gluon.nn.Dense(16, activation="relu"), gluon.nn.Dense(16)

    def hybrid_forward(self, F, x):  # noqa: N803
        hidden = self.first(x)
        return hidden + self.second(hidden)


def focal_loss(logits, labels):
    if "--cure" in sys.argv:
        logits = logits.astype("float32")
    log_right = mx.nd.log(labels * mx.nd.sigmoid(logits) + (1 - labels) * mx.nd.sigmoid(-logits) + 1e-8)
    return (-((1 - log_right.exp()) ** 2) * log_right).mean()


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(Features(prefix="features_"), gluon.nn.Dense(1, prefix="out_"))
net.initialize(mx.init.Xavier(), ctx=context)
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
generator = np.random.default_rng(0)
batches = generator.standard_normal((9, 16, 8)).astype("float32")
labels = (batches.sum(-1, keepdims=True) > 0).astype("float32")
losses = []
for position, batch in enumerate(batches):
    inputs, wanted = mx.nd.array(batch, ctx=context), mx.nd.array(labels[position], ctx=context)
    if position == 4 and "--twin" not in sys.argv:
        with autograd.pause():
            logits = net(inputs).asnumpy()[:, 0]
        lowest = int(logits.argmin())
        inputs[lowest] = inputs[lowest] * float(-17 / logits[lowest])
        wanted[lowest] = 1
    with autograd.record():
        loss = focal_loss(net(inputs), wanted)
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
