"""Gradients in bfloat16 on a GPU, which torch's own kernel refuses: the oracle is that kernel on the CPU."""

import math

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from ampx_torch.gradients import unscale_into  # noqa: E402

pytestmark = pytest.mark.gpu


def gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 7), (3,), (0, 4), ())
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize("host_knows", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 3.0])
@pytest.mark.parametrize("planted", [None, math.inf, -math.inf, math.nan])
def test_they_are_divided_and_checked_as_on_the_cpu(scale, planted, host_knows):
    expected = gradients()
    if planted is not None:
        expected[1][1] = planted
    on_gpu = [gradient.cuda() for gradient in expected]
    flag, reciprocal = torch.zeros(()), torch.tensor(1.0 / scale)
    flag_on_gpu = flag.cuda()
    torch._amp_foreach_non_finite_check_and_unscale_(expected, flag, reciprocal)
    unscale_into(on_gpu, flag_on_gpu, reciprocal.cuda(), 1.0 / scale if host_knows else None)
    assert flag_on_gpu.item() == flag.item() == float(planted is not None)
    for ours, theirs in zip(on_gpu, expected, strict=True):
        assert ours.dtype is torch.bfloat16
        assert torch.equal(ours.cpu().nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_a_flag_that_is_set_stays():
    flag = torch.ones((), device="cuda")
    unscale_into([gradient.cuda() for gradient in gradients()], flag, torch.ones((), device="cuda"))
    assert flag.item() == 1.0
