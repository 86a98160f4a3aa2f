"""`ampx.diagnose` names planted faults by place and kind, and accuses nobody of clean models.

Eager Paddle computes float32 on the CPU: float16 is simulated there, so every fault stands in a layer of its own.
"""

import math

import numpy as np
import paddle
import pytest
from paddle import nn

import ampx

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


class Times(nn.Layer):
    """Multiplies by one weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = self.create_parameter([1], default_initializer=nn.initializer.Constant(weight))

    def forward(self, inputs):
        return inputs * self.weight


class Does(nn.Layer):
    """Does something."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Square(paddle.autograd.PyLayer):
    """A custom function."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs * inputs

    @staticmethod
    def backward(ctx, slope):
        (inputs,) = ctx.saved_tensor()
        return slope * inputs * 2


class Attention(nn.Layer):
    """Scores, and their softmax."""

    def __init__(self):
        super().__init__()
        self.query, self.key = Times(300.0), Times(300.0)
        self.scores = Does(lambda query, key: paddle.matmul(query, key, transpose_y=True))
        self.softmax = nn.Softmax()

    def forward(self, inputs):
        return self.softmax(self.scores(self.query(inputs), self.key(inputs)))


class Normalized(nn.Layer):
    """Divides by a deviation, plus a small number."""

    def __init__(self):
        super().__init__()
        self.scale, self.divide = Times(1.0), Does(lambda inputs, divisor: inputs / divisor)

    def forward(self, inputs):
        inputs = self.scale(inputs)
        return self.divide(inputs - inputs.mean(), (inputs * 0).sum() + 1e-8)


class Masked(nn.Layer):
    """Hides the first element by a large negative number."""

    def __init__(self):
        super().__init__()
        self.scale, self.softmax = Times(1.0), nn.Softmax()
        self.mask = Does(lambda inputs: paddle.where(inputs == inputs[:, :1], paddle.full_like(inputs, -1e9), inputs))
        self.again = Does(lambda inputs: inputs - inputs[:, :1])

    def forward(self, inputs):
        return self.softmax(self.again(self.mask(self.scale(inputs))))


class Branches(nn.Layer):
    """Adds two branches."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(Times(1.0), Times(2.0))
        self.right = nn.Sequential(Times(400.0), Times(400.0))

    def forward(self, inputs):
        return self.left(inputs) + self.right(inputs) * 0.5


ONES = [[1.0, 2.0], [3.0, 4.0]]
ROWS = nn.Sequential
FAULTS = {
    "a middle layer": (lambda: ROWS(Times(2.0), Times(300.0), Times(400.0), Times(0.001)), ONES, "overflow", "2"),
    "attention scores": (Attention, ONES, "overflow", "scores"),
    "a sum": (lambda: ROWS(Times(9e3), Does(lambda x: x.sum())), ONES, "overflow", "1"),
    "epsilon": (Normalized, ONES, "epsilon", "divide"),
    "mask": (Masked, ONES, "mask", "mask"),
    "logarithm": (lambda: ROWS(Times(1e-9), Does(paddle.log)), ONES, "logarithm", "1"),
    "a sample": (lambda: ROWS(Times(1.0), Times(2.0)), [[1.0, math.nan], [1.0, 2.0]], "data", "0"),
    "learning rate": (lambda: ROWS(Times(1.0), Times(1e30), Times(1e30)), ONES, "learning rate", "2"),
    "weights": (lambda: ROWS(Times(1.0), Times(math.nan)), ONES, "weights", "1"),
    "a normalization": (
        lambda: ROWS(Times(300.0), Does(lambda x: x * x), Does(lambda x: x - x.mean())),
        ONES,
        "overflow",
        "1",
    ),
    "a custom function": (lambda: ROWS(Times(200.0), Does(Square.apply), Times(1e-4)), ONES, "overflow", "1"),
    "one of two branches": (Branches, ONES, "overflow", "right.1"),
    "division by zero": (lambda: ROWS(Times(1.0), Does(lambda x: 1 / (x - x))), ONES, "division", "1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    make, rows, kind, module = FAULTS[name]
    net, batch = make(), paddle.to_tensor(rows, "float32")
    diagnosis = ampx.diagnose(lambda net: net(batch).mean(), net, framework="paddle", dtype="float16")
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place.module, place.direction) == (kind, module, "forward"), str(diagnosis)


def test_a_planted_overflow_of_the_backward_pass_is_named():
    net, batch = ROWS(Times(2.0**-8), Times(2.0**-8), Times(500.0), Times(500.0)), paddle.to_tensor(ONES, "float32")
    diagnosis = ampx.diagnose(lambda net: net(batch).sum(), net, framework="paddle", dtype="float16")
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place.module, place.direction) == ("overflow", "1", "backward"), str(diagnosis)


def _convolution():
    return ROWS(nn.Conv2D(1, 2, 3, padding=1), nn.BatchNorm2D(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))


CLEAN = {
    "linear": lambda: nn.Linear(16, 2),
    "two layers": lambda: ROWS(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)),
    "tanh": lambda: ROWS(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)),
    "dropout": lambda: ROWS(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
    "batch norm": lambda: ROWS(nn.Linear(16, 8), nn.BatchNorm1D(8), nn.Linear(8, 2)),
    "layer norm": lambda: ROWS(nn.LayerNorm(16), nn.Linear(16, 2)),
    "gelu": lambda: ROWS(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 2)),
    "convolution": _convolution,
    "attention": lambda: ROWS(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), nn.Linear(16, 2)),
    "recurrent": lambda: ROWS(nn.GRU(16, 4), Does(lambda pair: pair[0])),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_is_not_accused(name):
    paddle.seed(0)
    shape = {"convolution": [4, 1, 4, 4], "attention": [2, 3, 16], "recurrent": [2, 3, 16]}.get(name, [8, 16])
    net, batch = CLEAN[name](), paddle.to_tensor(np.random.default_rng(0).normal(size=shape).astype("float32"))
    diagnosis = ampx.diagnose(lambda net: (net(batch) ** 2).mean(), net, framework="paddle", dtype="float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)
