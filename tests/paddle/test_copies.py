"""Copies of wrapped optimizers: what Paddle's own can, and clear words where they cannot."""

import copy
import pickle

import paddle
import pytest

import ampx


@pytest.fixture
def net():
    return paddle.nn.Linear(4, 1)


def values(net):
    return [parameter.numpy().tolist() for parameter in net.parameters()]


def test_a_copy_made_before_training_trains_by_itself(amp, backward, net):
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()), loss_scale=8.0)
    both = copy.deepcopy({"net": net, "opt": opt})
    twin, other = both["net"], both["opt"]
    assert other.optimizer is not opt.optimizer
    assert other.loss_scale == 8.0
    before = values(net)
    backward(twin(paddle.ones([2, 4])).square().mean(), other)
    with pytest.raises(ampx.RawStepError):
        other.optimizer.step()
    other.step()
    assert other.last_step.applied
    assert opt.last_step is None
    assert values(net) == before
    assert values(twin) != before


def test_a_copy_of_an_optimizer_that_has_stepped_is_refused(amp, backward, net):
    """Paddle's own cannot be copied then; the refusal changes nothing."""
    raw = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    opt = amp.wrap_optimizer(raw)
    backward(net(paddle.ones([2, 4])).mean(), opt)
    opt.step()
    opt.clear_grad()
    with pytest.raises(TypeError):
        copy.deepcopy(raw)
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"load opt\.state_dict\(\)"):
        copy.deepcopy(opt)
    backward(net(paddle.ones([2, 4])).mean(), opt)
    opt.step()
    assert opt.last_step.applied


def test_pickling_is_refused_as_by_paddle_but_says_what_to_do(amp, net):
    raw = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    with pytest.raises((AttributeError, TypeError)):
        pickle.dumps(raw)
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"paddle\.save"):
        pickle.dumps(amp.wrap_optimizer(raw))
