"""ArcFace of faces that are learned: a cosine of 0.9999 is 1 in float16, and the root in its sine has no slope at 0."""

import json
import math
import sys

import mxnet as mx
from mxnet import autograd, gluon


class ArcMargin(gluon.HybridBlock):
    def __init__(self, classes, size, margin=0.2, **options):
        super().__init__(**options)
        self.classes, self.cos, self.sin = classes, math.cos(margin), math.sin(margin)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(classes, size))

    def hybrid_forward(self, F, x, labels, weight):  # noqa: N803
        x, weight = F.L2Normalization(x), F.L2Normalization(weight)
        cosine = F.FullyConnected(x, weight, no_bias=True, num_hidden=self.classes)
        sine = F.sqrt(1 - cosine * cosine)
        chosen = F.one_hot(labels, self.classes)
        return 4 * (chosen * (cosine * self.cos - sine * self.sin) + (1 - chosen) * cosine)


class Faces(gluon.HybridBlock):
    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.embed = gluon.nn.HybridSequential(prefix="embed_")
            with self.embed.name_scope():
                self.embed.add(gluon.nn.Dense(32, activation="tanh"), gluon.nn.Dense(16))
            self.margin = ArcMargin(4, 16, prefix="margin_")

    def hybrid_forward(self, F, x, labels):  # noqa: N803
        return self.margin(self.embed(x), labels)


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
net = Faces(prefix="faces_")
net.initialize(mx.init.Xavier(), ctx=context)
persons, labels = mx.nd.random.normal(shape=(4, 8), ctx=context), mx.nd.arange(16, ctx=context) % 4
spread = 0.5 if "--twin" in sys.argv else 0.01
faces = mx.nd.take(persons, labels) + spread * mx.nd.random.normal(shape=(16, 8), ctx=context)
net.margin.weight.set_data(net.embed(persons))  # as pretraining would leave them
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_of, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []
for _ in range(10):
    with autograd.record():
        loss = loss_of(net(faces, labels), labels).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
