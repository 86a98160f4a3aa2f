"""Small models in Paddle with one planted fault each, and clean ones: for the tests and the benchmark of `diagnose`.

Eager Paddle computes float32 on the CPU: float16 is simulated there by rounding what layers take and return, so every
step that matters stands in a layer of its own. A GPU computes in float16.
"""

import math

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F  # noqa: N812


class Does(nn.Layer):
    """Does something in the dtype that it is passed, as code does that Paddle's lists do not know."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        with paddle.amp.auto_cast(enable=False):
            return self.function(*inputs)


def linear(size, weight=None):
    """A product with a matrix, which is low precision where anything is; with a weight, it multiplies by that."""
    layer = nn.Linear(size, size, bias_attr=False)
    if weight is not None:
        layer.weight.set_value(np.eye(size, dtype="float32") * weight)
    return layer


def sized(scale, *layers, size=8):
    """A model of layers and a batch of numbers of one magnitude; the loss is the mean of what comes out."""
    return nn.Sequential(*layers), mean_of(paddle.full([4, size], float(scale)))


def mean_of(batch):
    return lambda model: model(batch).astype("float32").mean()


class Scores(nn.Layer):
    """Attention scores, without a division by the root of their size."""

    def __init__(self):
        super().__init__()
        self.query, self.key = linear(64, 1.0), linear(64, 1.0)
        self.product = Does(lambda query, key: paddle.matmul(query, key, transpose_y=True))

    def forward(self, inputs):
        return F.softmax(self.product(self.query(inputs), self.key(inputs)).astype("float32"))


class Exponential(paddle.autograd.PyLayer):
    """A custom function."""

    @staticmethod
    def forward(ctx, inputs):
        result = paddle.exp(inputs)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, slope):
        (result,) = ctx.saved_tensor()
        return slope * result


class Branches(nn.Layer):
    """Adds three branches."""

    def __init__(self):
        super().__init__()
        self.branches = nn.LayerList([nn.Sequential(linear(8, weight), nn.ReLU()) for weight in (1.0, 1e4, 2.0)])

    def forward(self, inputs):
        return sum(branch(inputs) for branch in self.branches)


def softmax(scores):
    # On the CPU Paddle's own makes 1/8 each of eight scores that are NaN or -inf.
    weights = paddle.exp(scores - scores.max(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


class Masked(nn.Layer):
    """Scores of a sequence that consists of padding only."""

    def __init__(self, constant):
        super().__init__()
        self.mask = Does(lambda inputs: inputs + paddle.full(inputs.shape, constant).astype(inputs.dtype))
        self.softmax = Does(softmax)

    def forward(self, inputs):
        return self.softmax(self.mask(inputs))


class Rotated(nn.Layer):
    """Rotates by angles of late positions."""

    def __init__(self):
        super().__init__()
        self.positions = Does(lambda inputs: paddle.arange(100_000, 100_008, dtype="float32").astype(inputs.dtype))

    def forward(self, inputs):
        return inputs * paddle.sin(self.positions(inputs) * inputs)


class Standardized(nn.Layer):
    """Divides by a deviation that is a difference of large numbers."""

    def __init__(self):
        super().__init__()
        self.square = Does(lambda inputs: (inputs * inputs).mean(-1, keepdim=True))
        self.mean = Does(lambda inputs: inputs.mean(-1, keepdim=True))
        self.divide = Does(lambda inputs, square, mean: inputs / paddle.sqrt(square - mean * mean))

    def forward(self, inputs):
        return self.divide(inputs, self.square(inputs), self.mean(inputs))


class Similar(nn.Layer):
    """The cosine of the angle to a small vector, bounded as `cosine_similarity` is."""

    def __init__(self):
        super().__init__()
        self.small = Does(lambda inputs: inputs * 1e-4)
        self.square = Does(lambda inputs: inputs * inputs)
        self.length = Does(lambda squares: squares.sum(-1).sqrt())
        self.bound = Does(lambda norms: norms.clip(min=1e-8))
        self.divide = Does(lambda products, norms: products / norms)

    def forward(self, inputs):
        small = self.small(inputs)
        lengths = [self.length(self.square(each)) for each in (small, inputs)]
        return self.divide((inputs * small).sum(-1), self.bound(lengths[0] * lengths[1]))


class Constant(nn.Layer):
    """Divides what has no variance by a deviation, plus a small number."""

    def __init__(self):
        super().__init__()
        self.deviation = Does(lambda inputs: ((inputs - inputs.mean()) ** 2).mean() + 1e-8)
        self.divide = Does(lambda inputs, variance: (inputs - inputs.mean()) / variance.sqrt())

    def forward(self, inputs):
        return self.divide(inputs, self.deviation(inputs))


class Small(nn.Layer):
    """Divides by a sum, plus a small number."""

    def __init__(self):
        super().__init__()
        self.sum = Does(lambda inputs: inputs.abs().sum(-1, keepdim=True) + 1e-8)
        self.divide = Does(lambda inputs, divisor: inputs / divisor)

    def forward(self, inputs):
        return self.divide(inputs, self.sum(inputs))


class Focal(nn.Layer):
    """The loss of a sure prediction, times the root of how unsure it is."""

    def __init__(self):
        super().__init__()
        self.probability = Does(F.sigmoid)
        self.factor = Does(lambda probability: (1 - probability) ** 0.5)
        self.loss = Does(lambda probability: -paddle.log(probability))

    def forward(self, inputs):
        probability = self.probability(inputs)
        return self.factor(probability) * self.loss(probability)


def uneven(layer):
    """A model, and a batch of numbers around 30 that differ little."""
    return nn.Sequential(linear(8, 1.0), layer), mean_of(30 + paddle.linspace(-0.1, 0.1, 32).reshape([4, 8]))


def broken_sample():
    model, _ = sized(1.0, linear(8), nn.ReLU(), linear(8))
    batch = np.ones([4, 8], "float32")
    batch[2, 3] = math.nan
    return model, mean_of(paddle.to_tensor(batch))


def exploded():
    model, step = sized(1.0, linear(8), linear(8), nn.ReLU(), linear(8))
    for parameter in model.parameters():
        parameter.set_value(paddle.full_like(parameter, 1e15))
    return model, step


def broken_weights():
    model, step = sized(1.0, linear(8), linear(8))
    weight = model[1].weight.numpy()
    weight[0, 0] = math.nan
    model[1].weight.set_value(weight)
    return model, step


# By name what makes it, and what is to be named: kind, direction and module.
FAULTS = {
    "a middle layer": (
        lambda: sized(10.0, linear(8, 10.0), linear(8, 1e3), linear(8, 1e-4)),
        "overflow",
        "forward",
        "1",
    ),
    "attention scores": (lambda: sized(60.0, Scores(), size=64), "overflow", "forward", "0.product"),
    "a sum": (lambda: sized(100.0, linear(1024, 1.0), Does(lambda x: x.sum(-1)), size=1024), "sum", "forward", "1"),
    "backward": (
        lambda: sized(1.0, linear(8, 2.0**-8), linear(8, 2.0**-8), linear(8, 5e3), linear(8, 5e3)),
        "overflow",
        "backward",
        "2",
    ),
    "an epsilon": (lambda: sized(0.0, linear(8, 1.0), Small()), "epsilon", "forward", "1.divide"),
    "a mask constant": (lambda: sized(1.0, linear(8, 1.0), Masked(-1e9)), "mask", "forward", "1.mask"),
    "a logarithm of 0": (
        lambda: sized(
            1.0,
            linear(8, 1.0),
            Does(lambda x: F.softmax(x * paddle.arange(8).astype(x.dtype) * 5)),
            Does(paddle.log),
        ),
        "logarithm",
        "forward",
        "2",
    ),
    "a variance as a difference": (lambda: uneven(Standardized()), "digits", "forward", "1.divide"),
    "a mask of float32's lowest number": (
        lambda: sized(1.0, linear(8, 1.0), Masked(float(np.finfo(np.float32).min))),
        "mask",
        "forward",
        "1.mask",
    ),
    "a position beyond the dtype": (
        lambda: sized(1.0, linear(8, 1.0), Rotated()),
        "overflow",
        "forward",
        "1.positions",
    ),
    "logsumexp by hand": (
        lambda: sized(12.0, linear(8, 1.0), Does(paddle.exp), Does(lambda x: x.sum(-1)), Does(paddle.log)),
        "overflow",
        "forward",
        "1",
    ),
    "a temperature of 1e-4": (
        lambda: sized(10.0, linear(8, 1.0), Does(lambda x: x / 1e-4), Does(softmax)),
        "overflow",
        "forward",
        "1",
    ),
    "cosine similarity": (lambda: sized(1.0, linear(8, 1.0), Similar()), "epsilon", "forward", "1.divide"),
    "a constant image": (lambda: sized(1.0, linear(8, 1.0), Constant()), "epsilon", "forward", "1.divide"),
    "the focal factor of a sure prediction": (
        lambda: sized(10.0, linear(8, 1.0), Focal()),
        "digits",  # of the difference, which is why the root is at zero
        "backward",
        "1.factor",
    ),
    "NaN in one sample": (broken_sample, "data", "forward", "0"),
    "an exploded learning rate": (exploded, "learning rate", "forward", "3"),
    "weights that are NaN": (broken_weights, "weights", "forward", "1"),
    "a sensitive normalization": (
        lambda: sized(300.0, linear(8, 1.0), Does(lambda x: x * x), Does(lambda x: x / x.sum(-1, keepdim=True))),
        "overflow",
        "forward",
        "1",
    ),
    "a custom function": (lambda: sized(12.0, linear(8, 1.0), Does(Exponential.apply)), "overflow", "forward", "1"),
    "one of several branches": (
        lambda: sized(10.0, linear(8, 1.0), Branches(), Does(lambda x: x / 1e3)),
        "overflow",
        "forward",
        "1.branches.1.0",
    ),
    "a division by 0 in any precision": (
        lambda: sized(1.0, linear(8, 1.0), Does(lambda x: x / (x - x))),
        "division",
        "forward",
        "1",
    ),
    "the derivative of a root at 0": (
        lambda: sized(0.0, linear(8, 1.0), Does(lambda x: x.astype("float32").square().sqrt()), linear(8, 1.0)),
        "logarithm",
        "backward",
        "1",
    ),
}


class Attention(nn.Layer):
    """Attention behind a mask of -inf, which is meant."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiHeadAttention(16, 2)

    def forward(self, inputs):
        length = inputs.shape[1]
        mask = np.triu(np.full([length, length], -np.inf, "float32"), 1)
        return self.inner(inputs, inputs, inputs, attn_mask=paddle.to_tensor(mask))


class Recurrent(nn.Layer):
    """What a GRU returns step by step."""

    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(16, 4)

    def forward(self, inputs):
        return self.inner(inputs)[0]


class Recomputed(nn.Layer):
    """Forgets what it computed, and computes it again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())

    def forward(self, inputs):
        return inputs + recompute(self.inner, inputs)


def regression(*layers, shape=(4, 6, 16)):
    def make():
        batch = paddle.to_tensor(np.random.default_rng(0).normal(size=shape).astype("float32"))
        return nn.Sequential(*(layer() for layer in layers)), lambda m: m(batch).astype("float32").square().mean()

    return make


def classification():
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))
    labels = paddle.arange(6)
    return model, lambda m: F.cross_entropy(m(labels), labels)


def dense():
    return nn.Linear(16, 16)


def convolution():
    return nn.Conv2D(3, 4, 3)


CLEAN = {
    "linear": regression(dense),
    "layers": regression(dense, nn.ReLU, dense),
    "tanh": regression(dense, nn.Tanh, dense),
    "gelu": regression(dense, nn.GELU, dense),
    "dropout": regression(dense, nn.Dropout, lambda: nn.LayerNorm(16)),
    "convolutions": regression(
        convolution, lambda: nn.BatchNorm2D(4), nn.ReLU, lambda: nn.MaxPool2D(2), shape=(2, 3, 8, 8)
    ),
    "batch norm": regression(dense, lambda: nn.BatchNorm1D(16), dense, shape=(8, 16)),
    "a masked attention": regression(Attention),
    "a transformer": regression(lambda: nn.TransformerEncoderLayer(16, 2, 32)),
    "a recurrent network": regression(Recurrent),
    "a classifier": classification,
    "layers that are computed twice": regression(dense, Recomputed, Recomputed),
    "a bounded exponential": regression(dense, nn.Softplus, lambda: Does(lambda x: paddle.exp(-x))),
    "a mask that fits": regression(
        dense, lambda: Does(lambda x: softmax(paddle.where(x > 0.5, paddle.full_like(x, -1e4), x)))
    ),
    "a norm with an epsilon that fits": regression(
        dense, lambda: Does(lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-3))
    ),
}
