"""Whether gradients are finite, and their norm, for arrays of all sizes and dtypes; NumPy is the oracle."""

import numpy as np
import pytest

import ampx
from ampx_mxnet import gradients
from ampx_mxnet.compat import mx

# On the CPU, the large ones are checked one by one, and the others together.
SIZES = (70_000, 3, 1, 5_000, *(200,) * 230)


@pytest.fixture
def trainer():
    """Make a trainer with a loss scale of 4, whose parameters are zeros, and the parameters."""
    amp = ampx.init("mxnet", level="O0", loss_scale=4.0, nan_loss="skip")

    def make(*sizes, dtype="float32", **options):
        parameters = [mx.gluon.Parameter(f"w{place}", shape=(size,), dtype=dtype) for place, size in enumerate(sizes)]
        for parameter in parameters:
            parameter.initialize(mx.init.Zero())
        settings = {"learning_rate": 1.0, "multi_precision": dtype == "float16"}
        return amp.wrap_optimizer(mx.gluon.Trainer(parameters, "sgd", settings), **options), parameters

    return make


def backward(opt, parameters, slopes):
    """Run a backward whose true gradients are these NumPy arrays."""
    with mx.autograd.record():
        products = [
            (parameter.data() * mx.nd.array(slope, dtype=parameter.dtype)).sum().astype("float32")
            for parameter, slope in zip(parameters, slopes, strict=True)
        ]
        with ampx.scale_loss(mx.nd.add_n(*products), opt) as scaled:
            scaled.backward()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("clips", [False, True])
def test_a_bad_element_anywhere_skips_the_step_and_no_finite_one_does(trainer, dtype, clips):
    huge = {"float16": 1e4, "float32": 1e30, "float64": 1e30}[dtype]  # squares overflow
    opt, parameters = trainer(*SIZES, dtype=dtype, **({"max_grad_value": 1e38} if clips else {}))
    slopes = [np.full(size, huge) for size in SIZES]
    backward(opt, parameters, slopes)
    opt.step(1)
    assert opt.last_step.applied
    weights = [parameter.data().asnumpy() for parameter in parameters]
    assert all((values == -slope.astype(dtype)).all() for values, slope in zip(weights, slopes, strict=True))
    for which, place, bad in (
        (0, 0, np.inf),
        (0, 43_210, np.nan),
        (0, -1, -np.inf),
        (1, 2, np.nan),
        (2, 0, np.inf),
        (3, -1, np.nan),
        (4, 0, -np.inf),
        (len(SIZES) - 1, -1, np.nan),
    ):
        backward(opt, parameters, [np.ones(size) for size in SIZES])
        parameters[which].grad()[place % SIZES[which]] = bad
        opt.step(1)
        assert not opt.last_step.applied, (which, place, bad)
        for parameter, before in zip(parameters, weights, strict=True):
            assert (parameter.data().asnumpy() == before).all()


def test_large_arrays_are_not_left_to_the_kernel_that_is_slow_for_them(trainer, monkeypatch):
    many = gradients._multi_all_finite
    calls = []

    def look(*arrays, **options):
        calls.append([array.size for array in arrays])
        return many(*arrays, **options)

    monkeypatch.setattr(gradients, "_multi_all_finite", look)
    opt, parameters = trainer(*SIZES)
    backward(opt, parameters, [np.ones(size) for size in SIZES])
    opt.step(1)
    assert sorted(size for call in calls for size in call) == [1, 3, *(200,) * 230]
    assert [len(call) for call in calls] == [200, 32]


def test_many_layers_of_one_size_are_checked_by_one_call(trainer, monkeypatch):
    """One call each would cost more."""
    monkeypatch.setattr(gradients, "_all_finite", None)
    sizes = (4096,) * 40
    opt, parameters = trainer(*sizes)
    backward(opt, parameters, [np.ones(size) for size in sizes])
    opt.step(1)
    assert opt.last_step.applied


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_norm_of_a_large_array_loses_nothing(trainer, dtype):
    """MXNet's sum of squares is 0.4 % short there."""
    slopes = [np.random.default_rng(0).standard_normal(size) for size in (3_000_001, 1000, 7)]
    opt, parameters = trainer(*map(len, slopes), dtype=dtype)
    backward(opt, parameters, slopes)
    expected = np.sqrt(sum(np.square(slope.astype(dtype).astype("float64")).sum() for slope in slopes))
    assert float(ampx.clip_grad_norm(opt, 1e9).item()) == pytest.approx(expected, rel=1e-5)
