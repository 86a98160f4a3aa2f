"""What a step reads from the device, next to Paddle's own scaler, and how many kernels check the gradients."""

import contextlib
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle.amp import grad_scaler

import ampx

READS = ("item", "numpy", "tolist", "__bool__", "__nonzero__", "__int__", "__float__", "__array__")


class Counts:
    def __init__(self):
        self.reads = self.kernels = self._inside = 0

    def reading(self, function):
        def counted(*args, **kwargs):
            self.reads += not self._inside  # one read may be made of others
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return counted

    def checking(self, function):
        def counted(*args, **kwargs):
            self.kernels += 1
            return function(*args, **kwargs)

        return counted


@contextlib.contextmanager
def counting():
    """Count reads of tensors by the host, and calls of the kernel that checks and divides."""
    counts = Counts()
    with contextlib.ExitStack() as stack:
        for name in READS:
            function = getattr(paddle.Tensor, name, None)
            if function is not None:
                stack.enter_context(mock.patch.object(paddle.Tensor, name, counts.reading(function)))
        check = counts.checking(paddle._C_ops.check_finite_and_unscale_)
        stack.enter_context(mock.patch.object(paddle._C_ops, "check_finite_and_unscale_", check))
        yield counts


def network():
    paddle.seed(0)
    return paddle.nn.Sequential(*(paddle.nn.Linear(4, 4) for _ in range(6)))


class GpuPlace:
    is_gpu_place = staticmethod(lambda: True)


class GpuTracer:
    _expected_place = GpuPlace()


def native_scaler():
    """Make Paddle's scaler, which its check of the place keeps from being made on a CPU."""
    with mock.patch.object(grad_scaler, "_dygraph_tracer", GpuTracer):
        scaler = paddle.amp.GradScaler()
    scaler._scale = paddle.to_tensor(np.float32(2.0**16))
    return scaler


def native_counts():
    net = network()
    opt, scaler = paddle.optimizer.AdamW(0.1, parameters=net.parameters()), native_scaler()
    for _ in range(2):
        (net(paddle.ones([2, 4])).mean() * scaler._scale).backward()
        with counting() as counts:
            scaler.step(opt)
            scaler.update()
        opt.clear_grad()
    return counts


def ampx_counts(**options):
    net = network()
    opt = ampx.wrap_optimizer(paddle.optimizer.AdamW(0.1, parameters=net.parameters()), **options)
    for _ in range(2):
        with counting() as counts:
            with ampx.scale_loss(net(paddle.ones([2, 4])).mean(), opt) as scaled:
                scaled.backward()
            opt.step()
        opt.clear_grad()
    assert opt.last_step.applied
    return counts


@pytest.mark.usefixtures("amp")
def test_a_step_reads_once_and_checks_all_gradients_in_one_kernel():
    counts, native = ampx_counts(), native_counts()
    assert (counts.reads, counts.kernels) == (1, 1)
    assert native.reads >= counts.reads


@pytest.mark.usefixtures("amp")
def test_clipping_adds_no_read():
    """The norm stays where it was computed until `last_step` is asked."""
    assert ampx_counts(max_grad_norm=1.0).reads == 1
