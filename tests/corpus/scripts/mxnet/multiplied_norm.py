"""An RMSNorm by hand, which multiplies x by x in float16: 300 times 300 is beyond 65504."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon


class RMSNorm(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        return F.broadcast_mul(x, F.rsqrt(F.mean(x * x, axis=-1, keepdims=True) + 1e-6))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Dense(16), RMSNorm(), gluon.nn.Dense(1))
net.initialize(mx.init.Xavier(), ctx=context)
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-2})
inputs = mx.nd.random.normal(shape=(16, 8), ctx=context) * (10.0 if "--twin" in sys.argv else 1000.0)
targets = mx.nd.sign(inputs[:, :1])
loss_of, losses = gluon.loss.L2Loss(), []
for _ in range(8):
    with autograd.record():
        loss = loss_of(net(inputs), targets).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
