"""Models, and whole steps, under paddle.jit.to_static."""

import math

import paddle
import pytest

import ampx

# Paddle's translator asks for the place of a graph's value, and Paddle warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")

FACTORS = (1.0, 2.0, math.inf, 3.0)


class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = paddle.nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)


def make(amp=None):
    paddle.seed(0)
    model = Model()
    opt = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    return model, opt if amp is None else amp.wrap_optimizer(opt)


def plain():
    """Train eagerly, without ampx and without the step that overflows."""
    model, opt = make()
    for factor in FACTORS:
        if math.isfinite(factor):
            (model(paddle.ones([2, 4])).square().mean() * factor).backward()
            opt.step()
            opt.clear_grad()
    return model.linear.weight.tolist()


@pytest.mark.parametrize("full_graph", [False, True])
def test_models_under_to_static_train_as_eager_ones(full_graph, amp, backward):
    model, opt = make(amp)
    model = paddle.jit.to_static(model, full_graph=full_graph)
    applied = []
    for factor in FACTORS:
        backward(model(paddle.ones([2, 4])).square().mean() * factor, opt)
        opt.step()
        opt.clear_grad()
        applied.append(opt.last_step.applied)
    assert applied == [True, True, False, True]
    assert model.linear.weight.tolist() == plain()


def test_whole_steps_under_to_static_run_as_written(amp):
    """Paddle translates the step's bytecode; what ampx does in it is left alone."""
    model, opt = make(amp)

    def step(x, factor):
        loss = model(x).square().mean() * factor
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.clear_grad()
        return loss

    compiled = paddle.jit.to_static(step, full_graph=False)
    applied = []
    for factor in FACTORS:
        compiled(paddle.ones([2, 4]), paddle.to_tensor(factor))
        applied.append(opt.last_step.applied)
    assert applied == [True, True, False, True]
    assert model.linear.weight.tolist() == plain()


def test_whole_steps_in_one_graph_are_refused(amp):
    """Paddle itself has no backward there."""
    model, opt = make(amp)
    before = model.linear.weight.tolist()

    def step(x):
        with ampx.scale_loss(model(x).square().mean(), opt) as scaled:
            scaled.backward()
        opt.step()

    def only_step(x):
        opt.step()
        return x + 1.0

    with pytest.raises(ampx.LossDtypeError, match="put the model into the graph"):
        paddle.jit.to_static(step, full_graph=True)(paddle.ones([2, 4]))
    with pytest.raises(ampx.UnsupportedByBackendError, match="step of an eager optimizer in a static graph"):
        paddle.jit.to_static(only_step, full_graph=True)(paddle.ones([2, 4]))
    assert model.linear.weight.tolist() == before
