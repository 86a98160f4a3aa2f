"""MXNet's checks, and what MXNet knows about the machine."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from _gpu_checks import Check, Figure, NotHere, Setup, require

import ampx
from ampx_mxnet import devices
from ampx_mxnet.compat import mx
from ampx_mxnet.convert import convert_hybrid_block

# native-facts: 1 is an overflow; scales after each step, from 2**16 with a growth interval of 3.
PATTERN: Final = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
REFERENCE: Final = [2.0**power for power in (16, 16, 17, 16, 16, 16, 15, 14, 14, 14, 15, 15, 15, 16)]
OPTIMIZERS: Final = ("sgd", "nag", "adam", "rmsprop", "adagrad", "lamb")


def has(device: str) -> bool:
    """Return whether MXNet offers the device here."""
    return device == "cpu" or mx.context.num_gpus() > 0


def describe(device: str) -> dict[str, Any]:
    """Return the version, and which of its features were compiled in."""
    compiled = sorted(name for name, feature in mx.runtime.Features().items() if feature.enabled)
    return {**devices.describe(_place(device)).details, "compiled": compiled}


def scale_trace_is_the_reference_and_skips_change_nothing(setup: Setup) -> Figure:
    """Every optimizer: the specified trace, and the same bits after a skipped step."""
    for name in OPTIMIZERS:
        with _session(setup, level="O0", loss_scale=ampx.LossScale(growth_interval=3)) as amp:
            network = _network(setup)
            trainer = amp.wrap_optimizer(mx.gluon.Trainer(network.collect_params(), name, {"learning_rate": 0.01}))
            trace = []
            for overflow in PATTERN:
                before = _bits(network, trainer)
                _backward(setup, network, trainer, overflow)
                trainer.step(1)
                trace.append(trainer.loss_scale)
                same = before == _bits(network, trainer)
                require(same == bool(overflow), f"{name}: overflow {overflow}, unchanged {same}")
            require(trace == REFERENCE, f"{name}: {trace}, not {REFERENCE}")
    return Figure(f"{len(OPTIMIZERS)} optimizers", {"tried": list(OPTIMIZERS)})


def overflow_on_any_context_skips_on_all(setup: Setup) -> Figure:
    """Two contexts, the overflow on either: no weight moves on any; then both move alike."""
    contexts = _contexts(setup, 2)
    for overflow in range(2):
        with _session(setup, level="O0", loss_scale="dynamic") as amp:
            network = _network(setup, contexts)
            trainer = amp.wrap_optimizer(mx.gluon.Trainer(network.collect_params(), "adam", {"learning_rate": 0.01}))
            start = _weights(network, contexts)
            for bad in (True, False):
                with mx.autograd.record():
                    losses = [
                        network(mx.nd.ones((8, 16), ctx=context)).mean() * (math.inf if bad and i == overflow else 1.0)
                        for i, context in enumerate(contexts)
                    ]
                    with ampx.scale_loss(losses, trainer) as scaled:
                        mx.autograd.backward(scaled)
                trainer.step(2)
                require(trainer.last_step.applied is not bad, f"context {overflow}: {trainer.last_step}")
                weights = _weights(network, contexts)
                require((weights == start) is bad, f"context {overflow}: weights moved is {weights != start}")
            require(weights[0] == weights[1], f"context {overflow}: the contexts' weights differ")
    return Figure(", ".join(map(str, contexts)))


def gradients_that_add_are_true_sums(setup: Setup) -> Figure:
    """With `grad_req='add'`, under the casting of the device: three backwards, one step."""
    with _session(setup, dtype=_dtype(setup), loss_scale=1024.0) as amp:  # 2**16 times an input of 2 is too large
        layer = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
        layer.initialize(mx.init.One(), ctx=_contexts(setup, 1))
        layer.collect_params().setattr("grad_req", "add")
        trainer = amp.wrap_optimizer(mx.gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.125}))
        for _ in range(3):
            with mx.autograd.record():
                loss = layer(mx.nd.array([[1.0, 2.0]], ctx=_contexts(setup, 1)[0])).astype("float32").sum()
                with ampx.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
        trainer.step(1)
        weights = layer.weight.data().asnumpy().ravel().tolist()
        require(weights == [1 - 0.375, 1 - 0.75], f"the weights became {weights}")
    return Figure(f"weights {weights}")


def o1_casts_products_and_trains(setup: Setup) -> Figure:
    """A layer computes in the dtype, hybridized or not, its parameters stay float32, and the loss falls."""
    dtype = _dtype(setup)
    losses = {}
    for hybridize in (False, True):
        with _session(setup, dtype=dtype, loss_scale="dynamic") as amp:
            network = _network(setup)
            if hybridize:
                network.hybridize(static_alloc=True)
            output = network(mx.nd.ones((2, 16), ctx=_contexts(setup, 1)[0]))
            require(_name(output) == dtype, f"the output is {_name(output)}, not {dtype}")
            trainer = amp.wrap_optimizer(mx.gluon.Trainer(network.collect_params(), "adam", {"learning_rate": 0.01}))
            seen = []
            for _ in range(30):
                seen.append(_backward(setup, network, trainer, 0))
                trainer.step(1)
            require(seen[-1] < 0.5 * seen[0], f"{dtype}: the loss went from {seen[0]} to {seen[-1]}")
            dtypes = {_name(parameter.data()) for parameter in network.collect_params().values()}
            require(dtypes == {"float32"}, f"{dtype}: the parameters became {dtypes}")
            losses["hybridized" if hybridize else "imperative"] = seen[-1]
    return Figure(f"{dtype}: " + ", ".join(f"{way} {loss:.4f}" for way, loss in losses.items()), losses)


def converted_network_computes_what_it_did(setup: Setup) -> Figure:
    """A network converted for inference, against itself in float32."""
    dtype = _dtype(setup)
    with _session(setup, level="O0"):
        network = _network(setup)
        network.hybridize()
        data = mx.nd.random.uniform(shape=(8, 16), ctx=_contexts(setup, 1)[0])
        expected = network(data).asnumpy()
        outputs = convert_hybrid_block(network, dtype, cast_parameters=True)(data).astype("float32").asnumpy()
    error = float(abs(outputs - expected).max())
    # Two layers, each of which rounds its operands and its output to 8 bits or more; a width of 32 adds up.
    require(0 < error < 0.1 * abs(expected).max(), f"{dtype}: differs by {error} of {abs(expected).max()}")
    return Figure(f"{dtype}: largest difference {error:.1e}", {"error": error})


CHECKS: Final[tuple[Check, ...]] = (
    scale_trace_is_the_reference_and_skips_change_nothing,
    overflow_on_any_context_skips_on_all,
    gradients_that_add_are_true_sums,
    o1_casts_products_and_trains,
    converted_network_computes_what_it_did,
)
# None is larger in full runs.
MEASURED: Final[tuple[Check, ...]] = ()
# None asks for more than the simulated GPUs have.
NOT_SIMULATED: Final[dict[str, str]] = {}
# What a pass on a GPU shows in the table of what is covered. Casting there is to float16, which a GPU computes.
COVERS: Final = {
    "scale_trace_is_the_reference_and_skips_change_nothing": ("gpu/float32/O0/scaling",),
    "o1_casts_products_and_trains": ("gpu/float16/O1/casting",),
}


def _place(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def _contexts(setup: Setup, count: int) -> list[Any]:
    if setup.on_gpu and mx.context.num_gpus() < count:
        raise NotHere(f"needs {count} GPUs")
    return [mx.gpu(index) if setup.on_gpu else mx.cpu(index) for index in range(count)]


def _dtype(setup: Setup) -> str:
    device = devices.describe(_place(setup.device))
    can = sorted(device.native | device.emulated)
    if not can:
        raise NotHere(device.reason)
    return can[0]


def _session(setup: Setup, **options: Any) -> ampx.Amp:
    mx.random.seed(0)
    return ampx.init("mxnet", device=_place(setup.device), nan_loss="skip", **options)


def _network(setup: Setup, contexts: list[Any] | None = None) -> Any:
    network = mx.gluon.nn.HybridSequential()
    network.add(mx.gluon.nn.Dense(32, in_units=16, activation="relu"), mx.gluon.nn.Dense(4, in_units=32))
    network.initialize(mx.init.Xavier(), ctx=contexts or _contexts(setup, 1))
    return network


def _backward(setup: Setup, network: Any, trainer: Any, overflow: int) -> float:
    with mx.autograd.record():
        output = network(mx.nd.ones((8, 16), ctx=_contexts(setup, 1)[0]))
        loss = ((output.astype("float32") - 1.0) ** 2).mean() * (math.inf if overflow else 1.0)
        with ampx.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    return float(loss.asscalar())


def _name(array: Any) -> str:
    return "bfloat16" if np.dtype(array.dtype).names else np.dtype(array.dtype).name


def _weights(network: Any, contexts: list[Any]) -> list[bytes]:
    parameters = network.collect_params().values()
    return [b"".join(parameter.data(context).asnumpy().tobytes() for parameter in parameters) for context in contexts]


def _bits(network: Any, trainer: Any) -> tuple[list[bytes], bytes]:
    updater = trainer.trainer._updaters[0]
    return _weights(network, list(trainer.trainer._contexts)), updater.get_states(dump_optimizer=False)
