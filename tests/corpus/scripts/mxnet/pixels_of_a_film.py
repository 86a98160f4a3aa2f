"""Points of a pose in pixels of a film: at 2,500 float16 has steps of 2, and what is to be learned is smaller."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

ORIGIN = 0.0 if "--twin" in sys.argv else 2500.0


class Pose(gluon.HybridBlock):
    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.features = gluon.nn.HybridSequential(prefix="features_")
            with self.features.name_scope():
                self.features.add(gluon.nn.Dense(16, activation="tanh"), gluon.nn.LayerNorm())
            self.points = gluon.nn.Dense(6, bias_initializer=mx.init.Constant(ORIGIN), prefix="points_")

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.points(self.features(x))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = Pose(prefix="pose_")
net.initialize(mx.init.Xavier(), ctx=context)
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-2})
images = mx.nd.random.normal(shape=(16, 8), ctx=context)
targets = ORIGIN + 2 * images[:, :6] + 1
loss_of, losses = gluon.loss.HuberLoss(), []
for _ in range(16):
    with autograd.record():
        loss = loss_of(net(images), targets).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
