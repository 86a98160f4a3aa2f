"""Losses with loss scales of their own on one optimizer."""

import math

import paddle
import pytest
from loss_ids import rows, scales, set_scale

import ampx


@pytest.fixture
def parameter(weights):
    return weights(1.0, 1.0)


@pytest.fixture
def opt(amp, parameter):
    return amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (5, 0, 5), (0, 0, 1, 1, 0), (2,)], ids=str)
def test_gradients_of_losses_with_different_scales_add_up_to_the_true_ones(order, amp, opt, parameter, backward):
    for loss_id in set(order):
        set_scale(amp, loss_id, 2.0 ** (4 + loss_id))
    for position, loss_id in enumerate(order):
        backward((parameter * 2.0**position).sum(), opt, loss_id=loss_id)
    opt.step()
    assert opt.last_step.applied
    assert parameter.tolist() == [1.0 - (2 ** len(order) - 1)] * 2
    assert opt.last_step.scale == 2.0 ** (4 + min(order))


def test_overflow_early_in_a_window_of_several_losses_is_remembered(amp, opt, parameter, backward):
    for loss_id, factor in ((0, math.inf), (1, 1.0), (0, 1.0), (1, 1.0)):
        backward((parameter * factor).sum(), opt, loss_id=loss_id)
    opt.step()
    assert parameter.tolist() == [1.0, 1.0]
    assert scales(amp) == {0: 2.0**15, 1: 2.0**16}


def test_an_exception_in_a_later_losss_body_keeps_the_earlier_ones_gradients(amp, opt, parameter, backward):
    set_scale(amp, 1, 8.0)
    backward(parameter.sum(), opt, loss_id=0)

    def failing():
        with ampx.scale_loss((parameter * 4).sum(), opt, loss_id=1) as scaled:
            scaled.backward()
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            failing()
    backward((parameter * 2).sum(), opt, loss_id=1)
    opt.step()
    assert parameter.tolist() == [-2.0, -2.0]


def test_a_loss_that_gave_no_gradient_does_not_count(amp, opt, parameter, weights, backward):
    """What is known of its scale stays; one that never counted has no row."""
    elsewhere = weights(1.0)
    for loss_id, factor in ((0, 1.0), (2, math.inf)):
        backward((parameter * factor).sum(), opt, loss_id=loss_id)
    opt.step()
    opt.clear_grad(set_to_zero=False)
    backward(parameter.sum(), opt, loss_id=0)
    for loss_id in (1, 2):
        backward(elsewhere.sum(), opt, loss_id=loss_id)
    backward(parameter.sum(), opt, loss_id=0)
    opt.step()
    assert parameter.tolist() == [-1.0, -1.0]
    counted = {loss_id: (row["growth_tracker"], row["consecutive_skips"]) for loss_id, row in rows(amp).items()}
    assert counted == {0: (2, 0), 2: (0, 1)}
    assert scales(amp) == {0: 2.0**16, 2: 2.0**15}


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


@pytest.mark.parametrize("how", ["optimizer", "parameter"])
def test_clearing_between_losses_drops_the_earlier_ones_gradients(how, amp, opt, parameter, backward):
    backward((parameter * math.inf).sum(), opt, loss_id=0)
    if how == "parameter":
        parameter.clear_gradient()
        backward(parameter.sum(), opt, loss_id=1)
    else:
        with ampx.scale_loss(parameter.sum(), opt, loss_id=1) as scaled:
            opt.clear_grad()
            scaled.backward()
    opt.step()
    assert parameter.tolist() == [0.0, 0.0]
    assert {loss_id: row["growth_tracker"] for loss_id, row in rows(amp).items()} == {0: 0, 1: 1}
    assert scales(amp)[0] == 2.0**16


def test_unscale_and_clipping_see_the_sum_of_all_losses(amp, opt, parameter, backward):
    set_scale(amp, 1, 4.0)
    backward((parameter * 3).sum(), opt, loss_id=0)
    backward(parameter.sum(), opt, loss_id=1)
    norm = ampx.clip_grad_norm(opt, 1.0)
    assert norm.item() == pytest.approx(32**0.5)  # the gradient is (4, 4)
    opt.step()
    # A few roundings of float32 in the norm, the factor and the update.
    assert parameter.tolist() == pytest.approx([1 - 0.5**0.5] * 2, rel=1e-6)


def test_after_a_step_the_next_window_starts_afresh(amp, opt, parameter, backward):
    for loss_id in (0, 1):
        backward(parameter.sum(), opt, loss_id=loss_id)
    opt.step()
    parameter.clear_gradient()  # not the optimizer's clear_grad, which forgets the window too
    backward(parameter.sum(), opt)
    ampx.unscale(opt)
    with pytest.raises(ampx.ProtocolError, match="after unscale"):
        backward(parameter.sum(), opt)
    opt.step()
    assert parameter.tolist() == [-2.0, -2.0]


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
