"""`ampx.diagnose` names planted faults by place and kind, and accuses nobody of clean models.

MXNet has no float16 on a CPU: it is simulated there, so every fault stands in a block of its own.
"""

import math

import numpy as np
import pytest

import ampx
from ampx_mxnet.compat import mx

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


@pytest.mark.parametrize("name", FAULTS)
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


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_is_not_accused(name):
    shape = {"convolution": [4, 1, 4, 4], "recurrent": [2, 3, 16]}.get(name, [8, 16])
    net, batch = CLEAN[name](), array(np.random.default_rng(0).normal(size=shape))
    net.initialize(mx.init.Xavier())
    net(batch)  # gluon infers shapes
    diagnosis = ampx.diagnose(lambda net: (net(batch) ** 2).mean(), net, framework="mxnet", dtype="float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)
