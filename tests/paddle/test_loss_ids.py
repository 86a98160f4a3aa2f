"""Losses with loss scales of their own on one optimizer."""

import paddle
import pytest
from loss_ids import rows

import ampx


@pytest.fixture
def parameter(weights):
    return weights(1.0, 1.0)


@pytest.fixture
def opt(amp, parameter):
    return amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter]))


def test_a_loss_that_cleared_and_gave_no_gradient_counts_for_those_that_come_without_a_scale(
    amp, opt, parameter, weights, backward
):
    backward(parameter.sum(), opt, loss_id=0)
    with ampx.scale_loss(weights(1.0).sum(), opt, loss_id=1) as scaled:
        opt.clear_grad()
        scaled.backward()
    parameter.sum().backward()
    opt.step()
    assert parameter.tolist() == [0.0, 0.0]
    assert {loss_id: row["growth_tracker"] for loss_id, row in rows(amp).items()} == {0: 0, 1: 1}


def test_sparse_gradients_of_several_losses_are_refused_and_stay_usable(amp, backward):
    table = paddle.nn.Embedding(4, 2, sparse=True)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=table.parameters()))
    before = table.weight.numpy()
    backward(table(paddle.to_tensor([1])).sum(), opt)
    with pytest.raises(ampx.UnsupportedByBackendError, match="several loss ids"):
        backward(table(paddle.to_tensor([2])).sum(), opt, loss_id=1)
    opt.step()
    assert abs((before - table.weight.numpy()) - [[0, 0], [1, 1], [0, 0], [0, 0]]).max() < 1e-6


@pytest.mark.parametrize("others", [{}, {"max_grad_norm": 1.0}])
def test_a_sum_of_losses_that_overflows_is_skipped(weights, backward, others):
    """Each of the two is finite: 3e38 + 3e38 is beyond float32."""
    amp = ampx.init("paddle", level="O0", loss_scale=ampx.LossScale(init_scale=1.0, min_scale=0.25))
    parameter = weights(1.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter]), **others)
    for loss_id in (0, 1):
        backward((parameter * 3e38).sum(), opt, loss_id=loss_id)
    opt.step()
    assert (opt.last_step.applied, opt.last_step.finite) == (False, False)
    assert parameter.item() == 1.0
    assert [state.scale for state in opt.ampx_member.group.states.values()] == [0.5, 0.5]
    opt.clear_grad()
    for loss_id in (0, 1):
        backward((parameter * 0.25).sum(), opt, loss_id=loss_id)
    opt.step()
    assert parameter.item() == 0.5
