"""Hooke's law in pascals: the modulus of steel, 2.1e11, is infinite in float16, and so is every stress."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

PASCAL = 1e-9 if "--twin" in sys.argv else 1.0  # the twin counts in gigapascals
MODULUS, POISSON = 2.1e11 * PASCAL, 0.3


class Displacement(gluon.HybridBlock):
    """The displacement of a plate, as weights of smooth shapes, and its strains, from derivatives of the shapes."""

    def __init__(self, shapes, **options):
        super().__init__(**options)
        with self.name_scope():
            self.load = gluon.nn.Dense(24, activation="tanh", prefix="load_")
            self.strain = gluon.nn.Dense(3 * shapes, weight_initializer=mx.init.Normal(2e-4), prefix="strain_")
            self.shapes = shapes

    def hybrid_forward(self, F, loads):  # noqa: N803
        return F.reshape(self.strain(self.load(loads)), (-1, self.shapes, 3))


class PlaneStress(gluon.HybridBlock):
    def hybrid_forward(self, F, strain):  # noqa: N803
        xx, yy, xy = (F.slice_axis(strain, axis=2, begin=i, end=i + 1) for i in range(3))
        factor = MODULUS / (1 - POISSON**2)
        return F.concat(
            factor * (xx + POISSON * yy), factor * (yy + POISSON * xx), factor * (1 - POISSON) / 2 * xy, dim=2
        )


class Plate(gluon.HybridBlock):
    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.displacement = Displacement(4, prefix="displacement_")
            self.steel = PlaneStress(prefix="steel_")

    def hybrid_forward(self, F, loads):  # noqa: N803
        return self.steel(self.displacement(loads))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = Plate(prefix="plate_")
net.initialize(mx.init.Xavier(), ctx=context)
loads = mx.nd.random.normal(shape=(32, 6), ctx=context)
gauges = 2e8 * PASCAL * mx.nd.sin(mx.nd.dot(loads, mx.nd.random.normal(shape=(6, 12), ctx=context))).reshape((32, 4, 3))
strength = 2.5e8 * PASCAL
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 5e-5})
losses = []
for _ in range(14):
    with autograd.record():
        loss = mx.nd.mean(mx.nd.square((net(loads) - gauges) / strength))
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
