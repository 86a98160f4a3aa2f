"""The kit on JAX."""

import contextlib
import functools
import importlib.util
import os
import pathlib
import re
from typing import Any, ClassVar

import pytest
from hypothesis import settings

if not all(map(importlib.util.find_spec, ("jax", "optax", "flax"))):
    pytest.skip("JAX, optax or flax is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ampx_jax
from ampx.testing import BackendSuite, FuzzSuite, PluginSuite, ValueHarness
from ampx.testing.kit import automation, casting, lifecycle, precision, shipping
from ampx_jax.casting import active
from ampx_jax.state import find_all
from matrix import MatrixSuite
from transfer import TransferSuite


@jax.custom_vjp
def pull(parameter: Any, slopes: Any) -> Any:
    """The sum of a parameter in float32, with derivatives of the caller's choice."""
    return jnp.sum(parameter.astype("float32"))


pull.defvjp(
    lambda parameter, slopes: (pull(parameter, slopes), (slopes, parameter)),
    lambda kept, upstream: ((upstream * kept[0]).astype(kept[1].dtype), jnp.zeros_like(kept[0])),
)


@functools.partial(jax.jit, static_argnums=0)
def updated(opt: Any, gradients: Any, state: Any, parameters: Any) -> Any:
    updates, state = opt.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Chain(nnx.Module):
    """Layers that multiply, and behind them what makes noise."""

    def __init__(self, weights, noise):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(1, 1, use_bias=False, rngs=rngs) for _ in weights])
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.kernel[...] = jnp.full((1, 1), weight)
        self.norm = nnx.BatchNorm(1, rngs=rngs) if noise else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if noise else None

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None else self.dropout(self.norm(x))


class Twice(nnx.Module):
    def __call__(self, x):
        return x * 1, x * 2


class JaxHarness(ValueHarness):
    framework, plugin, device = "jax", "ampx_jax", "cpu"
    dtype: ClassVar[Any] = "bfloat16"
    models_are_values = True
    detaches = False  # whether a gradient can flow from a JAX array is known to nobody

    def tensor(self, values, dtype):
        return jnp.array(values, {"int64": "int32"}.get(dtype, dtype))

    def dtype_of(self, tensor):
        return {"int32": "int64"}.get(str(tensor.dtype), str(tensor.dtype))

    def numbers(self, tensor):
        return tensor.astype("float32").ravel().tolist()

    def parameter(self, values):
        return jnp.array(values, "float32")

    def optimizer(self, parameters, momentum):
        return optax.sgd(0.5, momentum=0.5 if momentum else None)

    def init(self, opt, parameters):
        return opt.init(parameters)

    def update(self, opt, gradients, state, parameters):
        if not gradients:
            return parameters, opt.update(gradients, state, parameters)[1]
        return updated(opt, gradients, state, parameters)

    def differentiate(self, function, parameters):
        return jax.grad(function)(parameters)

    def optimizer_state(self, raw):
        inner = find_all(raw)[0].inner if find_all(raw) else raw
        return [leaf.tolist() for leaf in jax.tree.leaves(inner)]

    def loss(self, parameters, gradients):
        pairs = zip(parameters, gradients, strict=True)
        return sum(pull(parameter, jnp.array(slopes, "float32")) for parameter, slopes in pairs)

    def nan_loss(self, parameters):
        return self.loss(parameters, [[1.0] * parameter.size for parameter in parameters]) * jnp.nan

    def casting(self):
        return active.value

    def computes_in(self):
        ones = jnp.ones((2, 2))
        lowered = jax.jit(ampx_jax.autocast(lambda a, b: jax.lax.dot(a, b))).lower(ones, ones).as_text()
        (factor,) = re.findall(r"dot_general .*: \(tensor<2x2x(\w+)>", lowered)  # sums may be wider
        return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[factor]

    def operation(self):
        return "dot_general"

    def chain(self, weights, inputs, noise=False):
        rows = jnp.array(inputs, "float32")[:, None]
        names = [f"layers.{place}" for place in range(len(weights))]
        return Chain(weights, noise), lambda model: jnp.sum(model(rows)), names

    def model(self):
        return [jnp.array([0.5, -0.25]), jnp.array([0.125])]

    def parameters_of(self, model):
        return list(model)

    def fork(self, inputs):
        model, _, _ = self.chain((1.0,), ())
        model.layers.append(Twice())

        def step(model):
            first, second = model(self.batch(inputs))
            return jnp.sum(first.astype("float32")) + 3 * jnp.sum(second.astype("float32"))

        return model, step, "layers.1"

    def shipped(self, weights, norm=False):
        model, _, names = self.chain(weights, (), noise=norm)
        return model, [*names, "norm"] if norm else names

    def batch(self, inputs):
        return jnp.array(inputs, "float32")[:, None]

    def stored(self, model, layer):
        state = nnx.state(model) if isinstance(model, nnx.Module) else model.args[0]
        for name in layer.split("."):
            state = state[int(name) if name.isdigit() else name]
        return {str(leaf.dtype) for leaf in jax.tree.leaves(state)}

    def model_state(self, model):
        return [
            jax.random.key_data(leaf).tolist() if is_key(leaf) else leaf.tolist()
            for leaf in jax.tree.leaves(nnx.state(model))
        ]

    def surroundings(self):
        return jnp.zeros(()).dtype, jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision


class Float16Harness(JaxHarness):
    dtype = "float16"


# Every case compiles a step of its own.
FEW = settings(max_examples=20, deadline=None, database=None, derandomize=True)


class InjectedHarness(Float16Harness):
    """Optimizers whose state has the learning rate."""

    tells_rates = True

    def optimizer(self, parameters, momentum):
        return optax.inject_hyperparams(optax.sgd)(0.5, momentum=0.5 if momentum else None)

    def set_rate(self, raw, rate):
        raw.hyperparams["learning_rate"] = jnp.array(rate)

    def update(self, opt, gradients, state, parameters):
        # Compiled inside of the run, as a script's own: of what was compiled before, observers hear at the end.
        return jax.jit(updated.__wrapped__, static_argnums=0)(opt, gradients, state, parameters)


class TestLearningRatesInTheState(automation.AutomationTests):
    harness = InjectedHarness


class TestFloat16(BackendSuite):
    harness = Float16Harness
    hypothesis = FEW


class TestBfloat16(
    automation.AutomationTests,
    casting.CastTests,
    casting.RegionTests,
    lifecycle.LevelTests,
    lifecycle.SessionTests,
    precision.ForceTests,
    precision.ReplayTests,
    precision.WatchTests,
    shipping.ConvertTests,
):
    """Tests in which something is cast: all others, whose steps compute in float32, would be the same again."""

    harness = JaxHarness


class FuzzHarness(JaxHarness):
    """Compiles the steps of a script's second optimizer only, and with AMPX_TEST_ALL those of all.

    Each optimizer has a configuration of its own, so each would be compiled, which takes most of the time.
    """

    def __init__(self):
        self.known = []

    def init(self, opt, parameters):
        self.known.append(opt)
        return super().init(opt, parameters)

    def update(self, opt, gradients, state, parameters):
        second = self.known[2:4]  # raw and wrapped
        compiles = bool(os.environ.get("AMPX_TEST_ALL")) or any(optimizer is opt for optimizer in second)
        with contextlib.nullcontext() if compiles else jax.disable_jit():
            return super().update(opt, gradients, state, parameters)


class TestFuzz(FuzzSuite):
    harness = FuzzHarness
    steps = 100  # each takes longer than ten without a framework


if any(device.platform == "gpu" for device in jax.devices()):

    class CudaHarness(Float16Harness):
        device = "cuda"

    @pytest.mark.gpu
    class TestOnCuda(BackendSuite):
        harness = CudaHarness

    @pytest.mark.gpu
    class TestMatrixOnCuda(MatrixSuite):
        harness = CudaHarness

else:

    @pytest.mark.gpu
    def test_on_cuda():
        pytest.skip("no CUDA device: the kit did not run on one")


class TestPlugin(PluginSuite):
    plugin, framework, modules = "ampx_jax", "jax", ("jax", "optax")


class TestMatrix(MatrixSuite):
    harness = JaxHarness


class TestTransfer(TransferSuite):
    harness = JaxHarness
    states = pathlib.Path(__file__).parents[1] / "states"
