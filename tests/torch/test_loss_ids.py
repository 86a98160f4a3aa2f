"""Losses with loss scales of their own on one optimizer, and losses given as trees."""

from collections import namedtuple
from unittest import mock

import pytest
import torch
from loss_ids import scales, set_scale
from torch import nn

import ampx

INF = float("inf")


@pytest.fixture(params=[False, True], ids=["host", "device"])
def opt(request, amp):
    parameter = nn.Parameter(torch.ones(2))
    return ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0, fused=True), device_scale=request.param)


def parameter_of(opt):
    return opt.param_groups[0]["params"][0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (5, 0, 5), (0, 0, 1, 1, 0), (2,)], ids=str)
def test_gradients_of_losses_with_different_scales_add_up_to_the_true_ones(order, opt, amp, backward):
    for loss_id in set(order):
        set_scale(amp, loss_id, 2.0 ** (4 + loss_id))
    parameter = parameter_of(opt)
    for position, loss_id in enumerate(order):
        backward((parameter * 2.0**position).sum(), opt, loss_id=loss_id)
    total = float(2 ** len(order) - 1)
    opt.step()
    assert opt.last_step.applied
    assert parameter.tolist() == [1 - total] * 2
    assert opt.last_step.scale == 2.0 ** (4 + min(order))


def test_only_the_loss_that_overflows_backs_off_and_the_whole_step_is_skipped(opt, amp, backward):
    parameter = parameter_of(opt)
    for bad in (1, 0):
        opt.zero_grad()
        for loss_id in (0, 1):
            backward((parameter * (INF if loss_id == bad else 1.0)).sum(), opt, loss_id=loss_id)
        opt.step()
        assert parameter.tolist() == [1.0, 1.0]
        assert not opt.last_step.applied
    assert scales(amp) == {0: 2.0**15, 1: 2.0**15}
    opt.zero_grad()
    for loss_id in (0, 1):
        backward(parameter.sum(), opt, loss_id=loss_id)
    opt.step()
    assert parameter.tolist() == [-1.0, -1.0]


def test_overflow_early_in_a_window_of_several_losses_is_remembered(opt, amp, backward):
    parameter = parameter_of(opt)
    for loss_id, factor in ((0, INF), (1, 1.0), (0, 1.0), (1, 1.0)):
        backward((parameter * factor).sum(), opt, loss_id=loss_id)
    opt.step()
    assert parameter.tolist() == [1.0, 1.0]
    assert scales(amp) == {0: 2.0**15, 1: 2.0**16}


def test_an_exception_in_a_later_losss_body_keeps_the_earlier_ones_gradients(opt, amp, backward):
    parameter = parameter_of(opt)
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


@pytest.mark.parametrize("how", ["opt", "model"])
def test_clearing_inside_a_later_losss_body_drops_the_earlier_ones_gradients(how, opt, amp, backward):
    parameter = parameter_of(opt)
    backward((parameter * INF).sum(), opt, loss_id=0)
    if how == "model":
        parameter.grad = None
        backward(parameter.sum(), opt, loss_id=1)
    else:
        with ampx.scale_loss(parameter.sum(), opt, loss_id=1) as scaled:
            opt.zero_grad()
            scaled.backward()
    opt.step()
    assert parameter.tolist() == [0.0, 0.0]
    counted = {entry["loss_id"]: entry["growth_tracker"] for entry in amp.state_dict(opt)["groups"][0]["losses"]}
    assert counted == {0: 0, 1: 1}
    assert scales(amp)[0] == 2.0**16


def test_gradients_that_are_views_of_a_buffer_stay_views_and_are_not_overwritten(opt, amp):
    """As DistributedDataParallel keeps them: the next backward writes into the same memory."""
    parameter = parameter_of(opt)
    set_scale(amp, 1, 4.0)
    buffer = torch.zeros(4)

    def communicate(gradient, scaled):
        buffer[1:3] = gradient * scaled.grad_fn(torch.ones(()))[0]
        parameter.grad = buffer[1:3]

    for loss_id, value in ((0, 1.0), (1, 2.0)):
        with ampx.scale_loss(parameter.sum(), opt, loss_id=loss_id) as scaled:
            communicate(torch.full((2,), value), scaled)
    assert parameter.grad.data_ptr() == buffer[1:3].data_ptr()
    opt.step()
    assert parameter.tolist() == [-2.0, -2.0]


def test_unscale_and_clipping_see_the_sum_of_all_losses(opt, amp, backward):
    parameter = parameter_of(opt)
    set_scale(amp, 1, 4.0)
    backward((parameter * 3).sum(), opt, loss_id=0)
    backward(parameter.sum(), opt, loss_id=1)
    norm = ampx.clip_grad_norm(opt, 1.0)
    assert norm.item() == pytest.approx(32**0.5)
    opt.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 1 - 0.5**0.5), rtol=1e-6, atol=1e-6)


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: [a, b],
        lambda a, b: (a, b),
        lambda a, b: {"a": a, "b": {"c": b}},
        Pair,
    ],
    ids=["list", "tuple", "dict", "namedtuple"],
)
def test_a_tree_of_losses_comes_back_scaled_in_the_same_shape(build, opt, amp):
    parameter = parameter_of(opt)
    losses = build((parameter * 2).sum(), parameter.sum())
    with ampx.scale_loss(losses, opt) as scaled:
        assert type(scaled) is type(losses)
        leaves = [*scaled.values()] if isinstance(scaled, dict) else [*scaled]
        leaves = [entry["c"] if isinstance(entry, dict) else entry for entry in leaves]
        assert [entry.item() for entry in leaves] == [4 * 2.0**16, 2 * 2.0**16]
        for entry in leaves:
            entry.backward()
    opt.step()
    assert parameter.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("bad", [-1, "0", 1.0, True, None], ids=repr)
def test_a_loss_id_that_is_none_is_refused(bad, opt, amp):
    with (
        pytest.raises(ampx.InvalidOptionError, match="loss_id"),
        ampx.scale_loss(parameter_of(opt).sum(), opt, loss_id=bad),
    ):
        pytest.fail("the body ran")


# -- sums, and losses without gradients ------------------------------------------------------------------


@pytest.mark.parametrize("values", [(3e38, 3e38), (3e38, -3e38), (1.0, 3e38, 3e38)], ids=str)
def test_a_sum_that_overflows_though_its_terms_are_finite_is_not_applied(values, opt, amp, backward):
    parameter = parameter_of(opt)
    for loss_id in range(len(values)):
        set_scale(amp, loss_id, 1.0)
    for loss_id, value in enumerate(values):
        backward((parameter * value).sum(), opt, loss_id=loss_id)
    overflows = abs(sum(values)) > 3.5e38
    opt.step()
    assert (opt.last_step.applied, opt.last_step.finite) == (not overflows, not overflows)
    assert parameter.tolist() == [1.0, 1.0]  # 3e38 - 3e38 is nothing to apply
    opt.zero_grad()
    for loss_id in range(len(values)):
        backward(parameter.sum(), opt, loss_id=loss_id)
    opt.step()
    assert opt.last_step.applied


def test_a_sum_that_overflows_counts_for_the_loss_that_came_last(opt, amp, backward):
    parameter = parameter_of(opt)
    for loss_id in (0, 1):
        set_scale(amp, loss_id, 4.0)
    backward((parameter * 8e37).sum(), opt, loss_id=1)
    for _ in range(4):  # each is 3.2e38 when it is scaled; all together are 4e38 when they are true
        backward((parameter * 8e37).sum(), opt, loss_id=0)
    opt.step()
    assert not opt.last_step.applied
    assert scales(amp) == {0: 2.0, 1: 4.0}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_loss_whose_backward_reaches_nothing_is_not_counted(order, opt, amp, backward):
    parameter, elsewhere = parameter_of(opt), nn.Parameter(torch.ones(2))
    for loss_id in order:
        backward((elsewhere if loss_id else parameter).sum(), opt, loss_id=loss_id)
    opt.step()
    trackers = {entry["loss_id"]: entry["growth_tracker"] for entry in amp.state_dict(opt)["groups"][0]["losses"]}
    assert (trackers[0], trackers.get(1, 0)) == (1, 0)
    assert parameter.tolist() == [0.0, 0.0]


def test_testing_the_sum_costs_no_wait_on_the_host(amp, backward):
    parameter = nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=0.0))
    reads = []
    with mock.patch.object(torch.Tensor, "item", lambda self: reads.append(1) or self.tolist()):
        for loss_id in (0, 1, 2):
            backward(parameter.sum(), opt, loss_id=loss_id)
        opt.step()
    assert len(reads) == 1  # of the first loss; of the others list by list
