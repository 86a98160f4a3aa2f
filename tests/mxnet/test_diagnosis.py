"""`ampx.diagnose` names planted faults by place and kind, and accuses nobody of clean models.

MXNet has no float16 on a CPU: what blocks take and return is rounded there, so every fault stands in a block of its
own. Faults that take a product to be in float16 are shown on a GPU, too, or one that is simulated.
"""

import math

import numpy as np
import pytest

import ampx
from ampx_mxnet.casting import switch
from ampx_mxnet.compat import mx
from products import first_of_each

nn = mx.gluon.nn


class Times(mx.gluon.Block):
    """Multiplies by one weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = self.params.get("weight", shape=(1,), init=mx.init.Constant(weight))
        self.weight.initialize()

    def forward(self, inputs):
        return mx.nd.broadcast_mul(inputs, self.weight.data())


class Does(mx.gluon.Block):
    """Does something."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Square(mx.autograd.Function):
    """A custom function."""

    def forward(self, inputs):
        self.save_for_backward(inputs)
        return inputs * inputs

    def backward(self, slope):
        (inputs,) = self.saved_tensors
        return slope * inputs * 2


class Attention(mx.gluon.Block):
    """Scores, and their softmax."""

    def __init__(self):
        super().__init__()
        self.query, self.key = Times(300.0), Times(300.0)
        self.scores = Does(lambda query, key: mx.nd.dot(query, key, transpose_b=True))
        self.softmax = Does(mx.nd.softmax)

    def forward(self, inputs):
        return self.softmax(self.scores(self.query(inputs), self.key(inputs)))


class Normalized(mx.gluon.Block):
    """Divides by a deviation, plus a small number."""

    def __init__(self):
        super().__init__()
        self.scale, self.divide = Times(1.0), Does(lambda x, divisor: mx.nd.broadcast_div(x, divisor))

    def forward(self, inputs):
        inputs = self.scale(inputs)
        return self.divide(inputs - 1, (inputs * 0).sum() + 1e-8)


class Masked(mx.gluon.Block):
    """Hides the first element by a large negative number."""

    def __init__(self):
        super().__init__()
        self.scale, self.softmax = Times(1.0), Does(mx.nd.softmax)
        self.mask = Does(lambda inputs: mx.nd.where(inputs < 2, mx.nd.full(inputs.shape, -1e9), inputs))
        self.again = Does(lambda inputs: inputs - inputs.min())

    def forward(self, inputs):
        return self.softmax(self.again(self.mask(self.scale(inputs))))


class Branches(mx.gluon.Block):
    """Adds two branches."""

    def __init__(self):
        super().__init__()
        self.left, self.right = rows(Times(1.0), Times(2.0)), rows(Times(400.0), Times(400.0))

    def forward(self, inputs):
        return self.left(inputs) + self.right(inputs) * 0.5


def rows(*blocks):
    net = nn.Sequential()
    net.add(*blocks)
    return net


ONES = [[1.0, 2.0], [3.0, 4.0]]
FAULTS = {
    "a middle layer": (lambda: rows(Times(2.0), Times(300.0), Times(400.0), Times(0.001)), ONES, "overflow", "2"),
    "attention scores": (Attention, ONES, "overflow", "scores"),
    "a sum": (lambda: rows(Times(9e3), Does(lambda x: x.sum())), ONES, "overflow", "1"),
    "epsilon": (Normalized, ONES, "epsilon", "divide"),
    "mask": (Masked, ONES, "mask", "mask"),
    "logarithm": (lambda: rows(Times(1e-9), Does(lambda x: mx.nd.log(x))), ONES, "logarithm", "1"),
    "a sample": (lambda: rows(Times(1.0), Times(2.0)), [[1.0, math.nan], [1.0, 2.0]], "data", "0"),
    "learning rate": (lambda: rows(Times(1.0), Times(1e30), Times(1e30)), ONES, "learning rate", "2"),
    "weights": (lambda: rows(Times(1.0), Times(math.nan)), ONES, "weights", "1"),
    "a normalization": (
        lambda: rows(Times(300.0), Does(lambda x: x * x), Does(lambda x: mx.nd.broadcast_sub(x, x.mean()))),
        ONES,
        "overflow",
        "1",
    ),
    "a custom function": (lambda: rows(Times(200.0), Does(lambda x: Square()(x)), Times(1e-4)), ONES, "overflow", "1"),
    "one of two branches": (Branches, ONES, "overflow", "right.1"),
    "division by zero": (lambda: rows(Times(1.0), Does(lambda x: 1 / (x - x))), ONES, "division", "1"),
}


def array(values):
    batch = mx.nd.empty(np.shape(values))
    batch[:] = np.asarray(values, "float32")
    return batch


@pytest.mark.parametrize("name", first_of_each(FAULTS, lambda name: FAULTS[name][2]))
def test_a_planted_fault_is_named(name):
    make, values, kind, module = FAULTS[name]
    net, batch = make(), array(values)
    diagnosis = ampx.diagnose(lambda net: net(batch).mean(), net, framework="mxnet", dtype="float16")
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place.module, place.direction) == (kind, module, "forward"), str(diagnosis)


def test_a_planted_overflow_of_the_backward_pass_is_named():
    net, batch = rows(Times(2.0**-8), Times(2.0**-8), Times(500.0), Times(500.0)), array(ONES)
    diagnosis = ampx.diagnose(lambda net: net(batch).sum(), net, framework="mxnet", dtype="float16")
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place.module, place.direction) == ("overflow", "1", "backward"), str(diagnosis)


class AsPassed(Does):
    """Does something in the dtype that it is passed, as code does that MXNet's lists do not know."""

    def forward(self, *inputs):
        with switch.Region(None):
            return self.function(*inputs)


def linear(weight=1.0, size=8):
    """Make a product with a matrix, which is in float16 where anything is; it multiplies by the weight."""
    layer = nn.Dense(size, in_units=size, use_bias=False, flatten=False)
    layer.initialize()
    layer.weight.set_data(mx.nd.eye(size) * weight)
    return layer


def filled(value, shape=(4, 8)):
    return np.full(shape, value, "float32")


def softmax(scores):
    weights = mx.nd.exp(mx.nd.broadcast_sub(scores, scores.max(axis=-1, keepdims=True)))
    return mx.nd.broadcast_div(weights, weights.sum(axis=-1, keepdims=True))


class Padding(mx.gluon.Block):
    """Scores of a sequence that consists of padding only."""

    def __init__(self, constant):
        super().__init__()
        # Written as float32, as masks are that a data loader makes.
        self.mask = AsPassed(lambda inputs: inputs + mx.nd.full(inputs.shape, constant).astype(inputs.dtype))
        self.softmax = AsPassed(softmax)

    def forward(self, inputs):
        return self.softmax(self.mask(inputs))


class Rotated(mx.gluon.Block):
    """Rotates by angles of late positions."""

    def __init__(self):
        super().__init__()
        self.positions = AsPassed(lambda inputs: mx.nd.arange(100_000, 100_008).astype(inputs.dtype))
        self.rotate = AsPassed(lambda inputs, positions: mx.nd.broadcast_mul(inputs, mx.nd.sin(positions)))

    def forward(self, inputs):
        return self.rotate(inputs, self.positions(inputs))


class Standardized(mx.gluon.Block):
    """Divides by a deviation that is a difference of large numbers."""

    def __init__(self):
        super().__init__()
        self.square = AsPassed(lambda inputs: (inputs * inputs).mean(axis=-1, keepdims=True))
        self.mean = AsPassed(lambda inputs: inputs.mean(axis=-1, keepdims=True))
        self.divide = AsPassed(
            lambda inputs, square, mean: mx.nd.broadcast_div(inputs, mx.nd.sqrt(square - mean * mean))
        )

    def forward(self, inputs):
        return self.divide(inputs, self.square(inputs), self.mean(inputs))


class Similar(mx.gluon.Block):
    """The cosine of the angle to a small vector, whose divisor has a bound."""

    def __init__(self):
        super().__init__()
        self.small = AsPassed(lambda inputs: inputs * 1e-4)
        self.square = AsPassed(lambda inputs: inputs * inputs)
        self.length = AsPassed(lambda squares: squares.sum(axis=-1).sqrt())
        self.bound = AsPassed(lambda norms: mx.nd.maximum(norms, 1e-8))
        self.product = AsPassed(lambda left, right: (left * right).sum(axis=-1))
        self.divide = AsPassed(lambda products, norms: products / norms)

    def forward(self, inputs):
        small = self.small(inputs)
        lengths = [self.length(self.square(each)) for each in (small, inputs)]
        return self.divide(self.product(inputs, small), self.bound(lengths[0] * lengths[1]))


class Constant(mx.gluon.Block):
    """Divides what has no variance by a deviation, plus a small number."""

    def __init__(self):
        super().__init__()
        self.center = AsPassed(lambda inputs: mx.nd.broadcast_sub(inputs, inputs.mean()))
        self.deviation = AsPassed(lambda centered: (centered**2).mean() + 1e-8)
        self.divide = AsPassed(lambda centered, variance: mx.nd.broadcast_div(centered, variance.sqrt()))

    def forward(self, inputs):
        centered = self.center(inputs)
        return self.divide(centered, self.deviation(centered))


class Focal(mx.gluon.Block):
    """The loss of a sure prediction, times the root of how unsure it is."""

    def __init__(self):
        super().__init__()
        self.probability = AsPassed(mx.nd.sigmoid)
        self.factor = AsPassed(lambda probability: (1 - probability) ** 0.5)
        self.loss = AsPassed(lambda probability: -mx.nd.log(probability))

    def forward(self, inputs):
        probability = self.probability(inputs)
        return self.factor(probability) * self.loss(probability)


ROWS = 30 + np.linspace(-0.1, 0.1, 32, dtype="float32").reshape(4, 8)  # that differ little
LOWEST = float(np.finfo(np.float32).min)
# By name: the model, its batch, and what is to be named, kind, direction and module.
IN_PRODUCTS = {
    "a layer between others": (
        lambda: rows(linear(10.0), linear(1e3), linear(1e-4)),
        filled(10.0),
        ("overflow", "forward", "1"),
    ),
    "a variance as a difference": (
        lambda: rows(linear(), Standardized()),
        ROWS,
        ("digits", "forward", "1.divide"),
    ),
    "a mask of float32's lowest number": (
        lambda: rows(linear(), Padding(LOWEST)),
        filled(1.0),
        ("mask", "forward", "1.mask"),
    ),
    "a position beyond the dtype": (
        lambda: rows(linear(), Rotated()),
        filled(1.0),
        ("overflow", "forward", "1.positions"),
    ),
    "logsumexp by hand": (
        lambda: rows(linear(), AsPassed(mx.nd.exp), AsPassed(lambda x: x.sum(axis=-1)), AsPassed(mx.nd.log)),
        filled(12.0),
        ("overflow", "forward", "1"),
    ),
    "a temperature of 1e-4": (
        lambda: rows(linear(), AsPassed(lambda x: x / 1e-4), AsPassed(softmax)),
        filled(10.0),
        ("overflow", "forward", "1"),
    ),
    "cosine similarity": (lambda: rows(linear(), Similar()), filled(1.0), ("epsilon", "forward", "1.divide")),
    "a constant image": (lambda: rows(linear(), Constant()), filled(1.0), ("epsilon", "forward", "1.divide")),
    "the focal factor of a sure prediction": (
        lambda: rows(linear(), Focal()),
        filled(10.0),
        ("digits", "backward", "1.factor"),  # of the difference, which is why the root is at zero
    ),
    "the derivative of a root at 0": (
        lambda: rows(linear(), AsPassed(lambda x: x.astype("float32").square().sqrt()), linear()),
        filled(0.0),
        ("logarithm", "backward", "1"),
    ),
}


def named(name, context):
    """Return kind, direction and module that are named on a context, and the text."""
    make, values, _ = IN_PRODUCTS[name]
    with context:
        net, batch = make(), array(values)
        options = {"framework": "mxnet", "dtype": "float16", "device": context.device_type}
        diagnosis = ampx.diagnose(lambda net: net(batch).astype("float32").mean(), net, **options)
    place = diagnosis.first_nonfinite
    return (diagnosis.kind, *((place.direction, place.module) if place else ())), str(diagnosis)


@pytest.mark.parametrize("name", first_of_each(IN_PRODUCTS, lambda name: IN_PRODUCTS[name][2][:2]))
def test_a_planted_fault_behind_a_product_is_named(name):
    actual, text = named(name, mx.cpu())
    assert actual == IN_PRODUCTS[name][2], text


@pytest.mark.gpu
@pytest.mark.parametrize("name", first_of_each(IN_PRODUCTS, lambda name: IN_PRODUCTS[name][2][:2]))
def test_a_planted_fault_behind_a_product_is_named_on_a_gpu(name):
    if not mx.context.num_gpus():
        pytest.skip("no CUDA device for mxnet")
    actual, text = named(name, mx.gpu())
    assert actual == IN_PRODUCTS[name][2], text


CLEAN = {
    "linear": lambda: nn.Dense(2),
    "two layers": lambda: rows(nn.Dense(8, activation="relu"), nn.Dense(2)),
    "tanh": lambda: rows(nn.Dense(8, activation="tanh"), nn.Dense(2)),
    "dropout": lambda: rows(nn.Dense(8), nn.Dropout(0.5), nn.Dense(2)),
    "batch norm": lambda: rows(nn.Dense(8), nn.BatchNorm(), nn.Dense(2)),
    "layer norm": lambda: rows(nn.LayerNorm(), nn.Dense(2)),
    "gelu": lambda: rows(nn.Dense(8), nn.GELU(), nn.Dense(2)),
    "convolution": lambda: rows(nn.Conv2D(2, 3, padding=1), nn.BatchNorm(), nn.Flatten(), nn.Dense(2)),
    "attention": lambda: rows(nn.Dense(8), Does(lambda x: mx.nd.dot(mx.nd.softmax(mx.nd.dot(x, x.T)), x)), nn.Dense(2)),
    "recurrent": lambda: rows(mx.gluon.rnn.GRU(4), nn.Dense(2)),
}


def verdict(name, context):
    """Return what is said of a clean model on a context."""
    shape = {"convolution": [4, 1, 4, 4], "recurrent": [2, 3, 16]}.get(name, [8, 16])
    with context:
        net, batch = CLEAN[name](), array(np.random.default_rng(0).normal(size=shape))
        net.initialize(mx.init.Xavier())
        net(batch)  # gluon infers shapes
        options = {"framework": "mxnet", "dtype": "float16", "device": context.device_type}
        return ampx.diagnose(lambda net: (net(batch).astype("float32") ** 2).mean(), net, **options)


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_is_not_accused(name):
    diagnosis = verdict(name, mx.cpu())
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)


# On simulated GPUs, where CPU kernels compute, a GRU needs oneDNN, and a dropout draws other numbers in float16.
ON_GPU = [name for name in CLEAN if name not in ("recurrent", "dropout")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_a_clean_model_is_not_accused_on_a_gpu(name):
    if not mx.context.num_gpus():
        pytest.skip("no CUDA device for mxnet")
    diagnosis = verdict(name, mx.gpu())
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)
