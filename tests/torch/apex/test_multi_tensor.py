"""The operations of amp_C and apex_C, against sums over Python numbers."""

import math

import pytest
import torch

from ampx.errors import InvalidOptionError
from ampx_torch.apex import amp_c, apex_c
from ampx_torch.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier


def flag(value=0):
    return torch.tensor([value], dtype=torch.int)


def tensors(*rows, dtype=torch.float32):
    return [torch.tensor(row, dtype=dtype) for row in rows]


def test_scale_writes_the_product_in_the_dtype_of_the_target():
    buffer, sources = flag(), tensors([1.0, 2.0], [4.0], dtype=torch.float16)
    targets = tensors([0.0, 0.0], [0.0])
    multi_tensor_applier(amp_c.multi_tensor_scale, buffer, [sources, targets], 0.25)
    assert [tensor.tolist() for tensor in targets] == [[0.25, 0.5], [1.0]]
    assert all(tensor.dtype == torch.float32 for tensor in targets)
    assert buffer.item() == 0


def test_scale_multiplies_before_it_rounds():
    sources, targets = tensors([2.0**15], dtype=torch.float16), tensors([0.0])
    multi_tensor_applier(amp_c.multi_tensor_scale, flag(), [sources, targets], 2.0**10)
    assert targets[0].item() == 2.0**25


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_scale_flags_what_is_not_finite(bad):
    buffer = flag()
    multi_tensor_applier(
        amp_c.multi_tensor_scale, buffer, [tensors([1.0], [1.0, bad]), tensors([0.0], [0.0, 0.0])], 1.0
    )
    assert buffer.item() == 1


def test_a_flag_that_is_set_stays():
    buffer = flag(1)
    multi_tensor_applier(amp_c.multi_tensor_scale, buffer, [tensors([1.0]), tensors([0.0])], 1.0)
    assert buffer.item() == 1


def test_large_finite_values_are_no_overflow():
    buffer = flag()
    multi_tensor_applier(amp_c.multi_tensor_scale, buffer, [tensors([3e38, 3e38]), tensors([0.0, 0.0])], 1.0)
    assert buffer.item() == 0


@pytest.mark.parametrize(("checked", "flagged"), [(-1, 1), (0, 0), (1, 1)])
def test_axpby_writes_the_sum_and_checks_what_it_is_told(checked, flagged):
    buffer, out = flag(), tensors([0.0, 0.0])
    lists = [tensors([1.0, 2.0]), tensors([10.0, math.inf]), out]
    multi_tensor_applier(amp_c.multi_tensor_axpby, buffer, lists, 2.0, 0.5, checked)
    assert out[0].tolist() == [7.0, math.inf]
    assert buffer.item() == flagged


def test_l2norm_is_that_of_all_and_of_each():
    total, each = multi_tensor_applier(amp_c.multi_tensor_l2norm, flag(), [tensors([3.0, 4.0], [12.0])], True)
    assert total.tolist() == [13.0]
    assert each.tolist() == [5.0, 12.0]
    total, each = multi_tensor_applier(amp_c.multi_tensor_l2norm, flag(), [tensors([3.0, 4.0])], False)
    assert total.tolist() == [5.0]
    assert each.numel() == 0


def test_l2norm_of_float16_does_not_overflow():
    total, _ = multi_tensor_applier(amp_c.multi_tensor_l2norm, flag(), [tensors([6e4, 6e4], dtype=torch.float16)])
    # 6e4 is 60000 in float16 exactly; float32 gives the root to 2**-24 of it.
    assert total.item() == pytest.approx(60000 * math.sqrt(2), rel=1e-6)


def test_no_tensors_are_no_error():
    assert multi_tensor_applier(amp_c.multi_tensor_l2norm, flag(), [[]])[0].tolist() == [0.0]
    multi_tensor_applier(amp_c.multi_tensor_scale, flag(), [[], []], 1.0)


def test_lists_that_do_not_fit_are_refused():
    with pytest.raises(InvalidOptionError, match=r"multi_tensor_scale got lists of \[1\].*accepted: 2"):
        amp_c.multi_tensor_scale(1, flag(), [tensors([1.0])], 1.0)
    with pytest.raises(InvalidOptionError, match=r"lists of \[1, 0, 1\]"):
        amp_c.multi_tensor_axpby(1, flag(), [tensors([1.0]), [], tensors([1.0])], 1.0, 1.0, 0)
    with pytest.raises(InvalidOptionError, match="arg_to_check=2"):
        amp_c.multi_tensor_axpby(1, flag(), [tensors([1.0])] * 3, 1.0, 1.0, 2)


def test_the_applier_is_available_and_passes_its_chunk_size_on():
    assert MultiTensorApply.available
    assert MultiTensorApply(7)(lambda *arguments: arguments, "flag", "lists", 1) == (7, "flag", "lists", 1)


def test_flatten_and_unflatten_are_inverse():
    several = tensors([[1.0, 2.0], [3.0, 4.0]], [5.0])
    flat = apex_c.flatten(several)
    assert flat.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [tensor.tolist() for tensor in apex_c.unflatten(flat, several)] == [[[1.0, 2.0], [3.0, 4.0]], [5.0]]


def test_a_norm_that_is_not_finite_is_flagged():
    for op in (amp_c.multi_tensor_l2norm, amp_c.multi_tensor_l2norm_mp):
        buffer = flag()
        norm, _ = multi_tensor_applier(op, buffer, [tensors([3.0, 4.0])], False)
        assert (norm.item(), buffer.item()) == (5.0, 0)
        multi_tensor_applier(op, buffer, [tensors([1.0, math.inf])], False)
        assert buffer.item() == 1


def test_norms_are_taken_of_what_is_scaled_or_unscaled():
    sources, targets = tensors([3.0, 4.0], [12.0], dtype=torch.float16), tensors([0.0, 0.0], [0.0])
    norm, each = amp_c.multi_tensor_l2norm_scale(0, flag(), [sources, targets], 0.5, True)
    assert (norm.item(), each.tolist()) == (13.0, [5.0, 12.0])
    assert [tensor.tolist() for tensor in targets] == [[1.5, 2.0], [6.0]]
    norm, each = amp_c.multi_tensor_unscale_l2norm(0, flag(), [sources], torch.tensor([0.5]), True)
    assert (norm.item(), each.tolist()) == (6.5, [2.5, 6.0])
    assert [tensor.tolist() for tensor in sources] == [[3.0, 4.0], [12.0]]


def test_a_scale_with_hysteresis_moves_by_the_rule_of_megatron():
    scale, growth, tolerated = torch.tensor([64.0]), torch.zeros(1, dtype=torch.int), torch.full((1,), 2).int()
    value, steps, left = 64.0, 0, 2
    for overflow in (0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1):
        returned = amp_c.update_scale_hysteresis(
            scale, growth, tolerated, torch.tensor([float(overflow)]), 4.0, 0.5, 3, 2
        )
        assert returned is scale
        if overflow:
            left, steps = left - 1, 0
            value = value * 0.5 if left <= 0 else value
        else:
            left, steps = 2, steps + 1
            if steps == 3:
                value, steps = value * 4, 0
        assert (scale.item(), growth.item(), tolerated.item()) == (value, steps, left)
    assert value == 32.0
