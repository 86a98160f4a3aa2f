"""Losses with loss scales of their own on one optimizer, and losses given as trees."""

from collections import namedtuple
from unittest import mock

import pytest
import torch
from loss_ids import scales, set_scale
from torch import nn

import ampx


@pytest.fixture(params=[False, True], ids=["host", "device"])
def opt(request, amp):
    parameter = nn.Parameter(torch.ones(2))
    return ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0, fused=True), device_scale=request.param)


def parameter_of(opt):
    return opt.param_groups[0]["params"][0]


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


def test_testing_the_sum_costs_no_wait_on_the_host(amp, backward):
    parameter = nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=0.0))
    reads = []
    with mock.patch.object(torch.Tensor, "item", lambda self: reads.append(1) or self.tolist()):
        for loss_id in (0, 1, 2):
            backward(parameter.sum(), opt, loss_id=loss_id)
        opt.step()
    assert len(reads) == 1  # of the first loss; of the others list by list
