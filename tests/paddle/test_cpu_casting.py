"""Native defect 9, shown in a process of its own: on a CPU Paddle is asked to cast, and silently does not."""

import paddle
import pytest

import ampx


class TestDefect9CastingOnTheCpuIsASilentNoOp:
    def test_native(self, native):
        code, out, err = native(
            """
lin = paddle.nn.Linear(2, 2)
paddle.amp.decorate(lin, level="O2", dtype="bfloat16")
with paddle.amp.auto_cast(dtype="bfloat16"):
    print(lin.weight.dtype, lin(paddle.ones([1, 2])).dtype)
"""
        )
        assert code == 0, err
        assert out.split()[-2:] == ["paddle.float32", "paddle.float32"]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_ampx_refuses(self, dtype, level):
        with pytest.raises(ampx.UnsupportedDtypeError, match="eager Paddle computes float32 on the CPU"):
            ampx.init("paddle", dtype=dtype, level=level)

    def test_ampx_falls_back_on_request_and_scales_all_the_same(self, weights, backward):
        with pytest.warns(ampx.PrecisionWarning, match="eager Paddle computes float32") as caught:
            amp = ampx.init("paddle", dtype="float16", on_unsupported="warn", loss_scale="dynamic")
        assert len(caught) == 1
        assert amp.effective.dtype is None
        self._scales(amp, weights, backward)

    def test_ampx_auto_is_off_with_one_warning_and_scales_all_the_same(self, weights, backward):
        with pytest.warns(ampx.PrecisionWarning, match="mixed precision is off on cpu: eager Paddle") as caught:
            amp = ampx.init("paddle", loss_scale="dynamic")
        assert len(caught) == 1
        assert "force" not in str(caught[0].message)
        self._scales(amp, weights, backward)

    def _scales(self, amp, weights, backward):
        parameter = weights(1.0)
        raw = paddle.optimizer.SGD(1.0, parameters=[parameter])
        opt = amp.wrap_optimizer(raw)
        backward(parameter.sum(), opt)
        assert parameter.grad.item() == 2.0**16
        opt.step()
        assert parameter.item() == 0.0
