"""Dispatch modes of ours end in any order and leave the stack as it was."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from ampx_torch.modes import Mode, leave


class Doubling(Mode):
    """Doubles what `neg` returns."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.neg.default and not self.ended else result


def negated():
    return torch.neg(torch.tensor(-1.0)).item()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_modes_that_end_in_any_order_act_until_then_and_leave_the_stack(order):
    modes = [Doubling() for _ in order]
    for mode in modes:
        mode.__enter__()
    for product, index in zip((4.0, 2.0, 1.0), order, strict=True):
        leave(modes[index])
        assert negated() == product
    assert not _get_current_dispatch_mode_stack()


def test_one_that_ends_below_a_mode_of_the_script_acts_no_more_and_is_gone_with_the_next_of_ours():
    first, second = Doubling(), Doubling()
    first.__enter__()
    with FlopCounterMode(display=False):
        leave(first)
        assert negated() == 1.0
    second.__enter__()
    leave(second)
    assert not _get_current_dispatch_mode_stack()
