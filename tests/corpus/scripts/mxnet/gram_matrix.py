"""Style transfer through a VGG of Gluon's model zoo: the Gram matrix of its features is beyond 65504 in float16."""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision


class GramMatrix(gluon.HybridBlock):
    def hybrid_forward(self, F, x):  # noqa: N803
        features = F.reshape(x, (0, 0, -1))
        return F.batch_dot(features, features, transpose_b=True) / (16 * 32 * 32)


class Style(gluon.HybridBlock):
    """An image, and the Gram matrix of its features in a frozen VGG."""

    def __init__(self, image, **options):
        super().__init__(**options)
        with self.name_scope():
            self.image = self.params.get("image", shape=image.shape, init=mx.init.Constant(image))
            self.features, self.gram = gluon.nn.HybridSequential(), GramMatrix()
            self.features.add(*vision.vgg11(prefix="vgg_").features[:2])
        self.features.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F, offset, image):  # noqa: N803
        return self.gram(self.features(F.broadcast_add(image, offset)))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
content, style = (mx.nd.random.uniform(-120, 120, shape=(1, 3, 32, 32)) for _ in range(2))  # Caffe's pixels
style[:, :, ::4] *= 0.2
scale = 1 / 58 if "--twin" in sys.argv else 1.0  # as everybody else has them
content, style = content * scale, style * scale
model = Style(content, prefix="net_")
model.initialize(mx.init.Xavier(), ctx=context)
zero = mx.nd.zeros((1, 1, 1, 1), ctx=context)
targets = model.gram(model.features(style.as_in_context(context)))
trainer = gluon.Trainer(model.collect_params(".*image"), "adam", {"learning_rate": scale})
losses = []
for _ in range(10):
    with autograd.record():
        loss = mx.nd.square(model(zero) / targets.mean() - targets / targets.mean()).mean()
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
