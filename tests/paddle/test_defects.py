"""Defects of plain Paddle (each shown in a process of its own), and the right result through ampx.

Paddle's GradScaler refuses to be enabled on the CPU, so the native halves tell it that the place is a GPU; what
follows is logic that does not look at the device.
"""

import math

import numpy as np
import paddle
import pytest

import ampx
from ampx_paddle.scaler import GradScaler

NATIVE = """
from unittest import mock
import paddle.amp.grad_scaler as module
class Place:
    is_gpu_place = staticmethod(lambda: True)
class Tracer:
    _expected_place = Place()
def make_scaler(**options):
    with mock.patch.object(module, "_dygraph_tracer", lambda: Tracer()):
        return paddle.amp.GradScaler(**options)
def make(value=1.0):
    w = paddle.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Assign([value]))
    return w, paddle.optimizer.SGD(1.0, parameters=[w])
with paddle.amp.auto_cast(dtype="float16"):
    pass
"""


def make(weights, value=1.0):
    parameter = weights(value)
    return parameter, paddle.optimizer.SGD(1.0, parameters=[parameter])


class TestDefect5PlainStepAfterASkipDoesNothing:
    def test_native(self, native):
        code, out, err = native(
            NATIVE
            + """
w, opt = make()
scaler = make_scaler(use_dynamic_loss_scaling=False)
scaler.scale(w.sum() * float("inf")).backward()
scaler.step(opt); scaler.update(); opt.clear_grad()
w.sum().backward()
opt.step()
print(w.item())
"""
        )
        assert code == 0, err
        assert float(out.split()[-1]) == 1.0  # a plain step of length 1 was lost

    def test_ampx(self, amp, weights, backward):
        parameter, raw = make(weights)
        opt = amp.wrap_optimizer(raw)
        backward(parameter.sum() * math.inf, opt)
        opt.step()
        opt.clear_grad()
        assert parameter.item() == 1.0
        parameter.sum().backward()
        raw.step()
        assert parameter.item() == 0.0

    def test_ampx_takes_over_an_optimizer_that_paddle_left_so(self, amp, weights, backward):
        parameter, raw = make(weights)
        raw._set_auxiliary_var("found_inf", True)
        opt = amp.wrap_optimizer(raw)
        backward(parameter.sum(), opt)
        opt.step()
        assert opt.last_step.applied
        assert parameter.item() == 0.0


class TestDefect6FirstOverflowRaisesUnderNumpy24:
    @pytest.mark.skipif(
        tuple(map(int, np.__version__.split(".")[:2])) < (2, 4), reason="numpy before 2.4 converts such arrays"
    )
    def test_native(self, native):
        code, _, err = native(
            NATIVE
            + """
w, opt = make()
scaler = make_scaler()
scaler.scale(w.sum() * float("inf")).backward()
scaler.step(opt); scaler.update()
"""
        )
        assert code != 0
        assert "only 0-dimensional arrays can be converted" in err

    @pytest.mark.parametrize("through_scaler", [False, True])
    def test_ampx(self, amp, weights, backward, capsys, through_scaler):
        parameter, raw = make(weights)
        opt = amp.wrap_optimizer(raw)
        if through_scaler:
            scaler = GradScaler(opt)
            scaler.scale(parameter.sum() * math.inf).backward()
            scaler.step(opt)
            scaler.update()
        else:
            backward(parameter.sum() * math.inf, opt)
            opt.step()
        assert opt.last_step == ampx.StepResult(False, False, 2.0**16, 2.0**15, 1)
        assert capsys.readouterr() == ("", "")  # plain Paddle prints every backoff


class TestDefect7ScalerSwitchesItselfOffAfterAnyOtherAutoCast:
    def test_native(self, native):
        code, out, err = native(
            NATIVE
            + """
scaler, loss = make_scaler(), paddle.to_tensor(2.0)
before = scaler.scale(loss).item()
with paddle.amp.auto_cast(enable=False, dtype="bfloat16"):
    pass
print(before, scaler.scale(loss).item(), scaler.is_enable())
"""
        )
        assert code == 0, err
        assert out.split()[-3:] == ["131072.0", "2.0", "False"]

    @pytest.mark.parametrize("through_scaler", [False, True])
    def test_ampx(self, amp, weights, through_scaler):
        parameter, raw = make(weights, 2.0)
        opt = amp.wrap_optimizer(raw)
        for dtype in ("float16", "bfloat16"):
            with paddle.amp.auto_cast(enable=False, dtype=dtype):
                pass
        if through_scaler:
            scaled = GradScaler(opt).scale(parameter.sum())
        else:
            with ampx.scale_loss(parameter.sum(), opt) as scaled:
                pass
        assert scaled.item() == 2.0 * 2.0**16


class TestDefect8SparseGradientKillsTheProcess:
    SPARSE = """
emb = paddle.nn.Embedding(5, 3, sparse=True)
opt = paddle.optimizer.SGD(1.0, parameters=emb.parameters())
"""

    def test_native(self, native):
        code, out, _ = native(
            NATIVE
            + self.SPARSE
            + """
scaler = make_scaler()
scaler.scale(emb(paddle.to_tensor([1])).sum()).backward()
print("backward", flush=True)
scaler.step(opt)
print("step", flush=True)
"""
        )
        assert code != 0  # the kernel reads memory of another class: a signal, or an error about absurd dimensions
        assert out.startswith("backward")
        assert "step" not in out.splitlines()

    @pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
    def test_ampx(self, amp, backward, optimizer):
        rows = paddle.to_tensor([1, 1, 3])
        sparse, other = (paddle.nn.Embedding(5, 3, sparse=flag) for flag in (True, optimizer == "Adam"))
        other.weight.set_value(sparse.weight.numpy())  # sparse Adam rounds otherwise than dense Adam
        make_raw = getattr(paddle.optimizer, optimizer)
        opt = amp.wrap_optimizer(make_raw(0.5, parameters=sparse.parameters()))
        plain = make_raw(0.5, parameters=other.parameters())
        for factor in (1.0, math.inf, 0.25):
            backward((sparse(rows) * factor).sum(), opt)
            assert sparse.weight._grad_ivar().is_selected_rows()
            opt.step()
            opt.clear_grad()
            assert opt.last_step.applied is (factor != math.inf)
            if factor != math.inf:
                (other(rows) * factor).sum().backward()
                plain.step()
                plain.clear_grad()
            assert (sparse.weight.numpy() == other.weight.numpy()).all()

    def test_ampx_clips_sparse_gradients(self, amp, backward):
        """Rows that were looked up twice count once, with their sum: (2, 1) has the norm sqrt(5)."""
        emb = paddle.nn.Embedding(4, 1, sparse=True)
        before = emb.weight.numpy().copy()
        opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=emb.parameters()), max_grad_norm=1.0)
        backward(emb(paddle.to_tensor([0, 0, 2])).sum(), opt)
        opt.step()
        moved = (before - emb.weight.numpy()).ravel()
        np.testing.assert_allclose(moved, np.array([2, 0, 1, 0]) / math.sqrt(5), rtol=1e-5)
        assert math.isclose(opt.last_step.grad_norm, math.sqrt(5), rel_tol=1e-6)

    def test_ampx_clips_sparse_values(self, amp, backward):
        emb = paddle.nn.Embedding(4, 1, sparse=True)
        before = emb.weight.numpy().copy()
        opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=emb.parameters()), max_grad_value=1.5)
        backward(emb(paddle.to_tensor([0, 0, 2])).sum(), opt)
        opt.step()
        np.testing.assert_allclose((before - emb.weight.numpy()).ravel(), [1.5, 0, 1, 0], rtol=1e-6)


class TestSeveralOptimizersOfOneScaler:
    """peers.md 2.5: the scaler has one `found_inf` for all optimizers."""

    def test_native_applies_inf_of_one_after_looking_at_the_other(self, native):
        code, out, err = native(
            NATIVE
            + """
(a, opt_a), (b, opt_b) = make(), make()
scaler = make_scaler()
scaler.scale(a.sum() * float("inf") + b.sum()).backward()
scaler.unscale_(opt_a); scaler.unscale_(opt_b)
scaler.step(opt_a); scaler.step(opt_b); scaler.update()
print(np.isfinite(a.item()), scaler.state_dict()["scale"][0])
"""
        )
        assert code == 0, err
        assert out.split()[-2:] == ["False", "65536.0"]

    @pytest.mark.parametrize("through_scaler", [False, True])
    @pytest.mark.parametrize("overflow", [0, 1])
    def test_ampx(self, amp, weights, backward, overflow, through_scaler):
        parameters = weights(1.0), weights(1.0)
        raw = [paddle.optimizer.SGD(1.0, parameters=[parameter]) for parameter in parameters]
        opts = amp.wrap_optimizer(raw)
        scaler = GradScaler(*opts)
        factors = [math.inf if index == overflow else 1.0 for index in range(2)]
        loss = sum(
            (parameter.sum() * factor for parameter, factor in zip(parameters, factors, strict=True)), paddle.zeros([])
        )
        if through_scaler:
            scaler.scale(loss).backward()
            for opt in opts:
                scaler.unscale_(opt)
            for opt in opts:
                scaler.step(opt)
            scaler.update()
        else:
            backward(loss, opts)
            for opt in opts:
                ampx.unscale(opt)
            for opt in opts:
                opt.step()
        assert [parameter.item() for parameter in parameters] == [
            1.0 if index == overflow else 0.0 for index in range(2)
        ]
        assert [opt.loss_scale for opt in opts] == [2.0**15, 2.0**15]


class TestKernelTestsBeforeItDivides:
    def test_native(self, native):
        code, out, err = native(
            NATIVE
            + """
w, opt = make()
scaler = make_scaler(init_loss_scaling=2.0**-10, use_dynamic_loss_scaling=False)
w.grad = paddle.to_tensor([3e38])
scaler.step(opt)
print(w.item())
"""
        )
        assert code == 0, err
        assert out.split()[-1] == "-inf"

    def test_ampx(self, amp, weights, backward):
        parameter, raw = make(weights)
        opt = amp.wrap_optimizer(raw, loss_scale=2.0**-10)
        with ampx.scale_loss(parameter.sum(), opt) as scaled:
            scaled.backward()
            parameter.grad = paddle.to_tensor([3e38])
        opt.step()
        assert not opt.last_step.applied
        assert parameter.item() == 1.0
