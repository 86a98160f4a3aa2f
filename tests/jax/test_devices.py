"""What is trained on several devices, and what is lowered for a device that is absent."""

import contextlib
import functools
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ampx
import ampx_jax
from ampx.backend import offer
from ampx.run import Automation, Run, RunSettings
from ampx_jax import devices

# Whole numbers: products and float32 sums are exact, and neither dtype can hold most sums of one device.
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.integers(-3, 4, (16, 8)).astype(np.float32)
INPUTS = RANDOM.integers(1, 8, (512, 16)).astype(np.float32)
UPSTREAM = RANDOM.integers(1, 8, (512, 8)).astype(np.float32)


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        ampx.init("jax", dtype=request.param, device="cpu", loss_scale=1.0)
    yield request.param
    ampx.shutdown()


def gradient(weight, inputs, upstream):
    def loss(weight):
        return jnp.sum(ampx_jax.autocast(jnp.matmul)(inputs, weight) * upstream)

    return jax.grad(loss)(weight)


def by_shardings(kind, *args):
    mesh = jax.make_mesh((2,), ("batch",), (kind,))
    rows, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    placed = [jax.device_put(array, place) for array, place in zip(args, (whole, rows, rows), strict=True)]
    return jax.jit(gradient), placed


def by_shard_map(checked, *args):
    def step(*args):
        gradients = gradient(*args)
        return gradients if checked else jax.lax.psum(gradients, "batch")  # checked: JAX adds them up itself

    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Auto,))
    specs = {"in_specs": (P(), P("batch"), P("batch")), "out_specs": P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=checked, **specs)), args


def by_shard_map_inside(checked, *args):
    def loss(weight, inputs, upstream):
        return jax.lax.psum(jnp.sum((inputs @ weight) * upstream), "batch")

    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Auto,))
    specs = {"in_specs": (P(), P("batch"), P("batch")), "out_specs": P()}
    mapped = jax.shard_map(loss, mesh=mesh, check_vma=checked, **specs)
    return jax.jit(jax.grad(ampx_jax.autocast(mapped))), args


def by_pmap(weight, *rows):
    step = jax.pmap(lambda *args: jax.lax.psum(gradient(*args), "batch"), axis_name="batch", in_axes=(None, 0, 0))
    return step, (weight, *(array.reshape(2, -1, array.shape[1]) for array in rows))


WAYS = {
    "shardings": functools.partial(by_shardings, AxisType.Auto),
    "shardings in types": functools.partial(by_shardings, AxisType.Explicit),
    "shard_map": functools.partial(by_shard_map, True),
    "shard_map without checks": functools.partial(by_shard_map, False),
    "autocast of shard_map": functools.partial(by_shard_map_inside, True),
    "autocast of shard_map without checks": functools.partial(by_shard_map_inside, False),
    "pmap": by_pmap,
}


@pytest.mark.parametrize("way", WAYS)
def test_devices_add_up_gradients_of_weights_in_float32(way, dtype):
    step, args = WAYS[way](WEIGHT, INPUTS, UPSTREAM)
    exact = INPUTS.T @ UPSTREAM
    assert not np.array_equal(exact, jnp.asarray(exact, dtype)), "the session's dtype cannot hold it"
    for each_device in np.asarray(step(*args)).reshape(-1, *exact.shape):
        np.testing.assert_array_equal(each_device, exact)
    reductions = re.findall(r"= (\S+) all-reduce\(", step.lower(*args).compile().as_text())
    assert {kind.partition("[")[0] for kind in reductions} == {"f32"}


@pytest.mark.parametrize("checked", [True, False])
def test_autocast_goes_into_shard_map(checked, dtype):
    """`ampx run` casts what a script differentiates, which may be a function under shard_map."""
    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Auto,))
    specs = {"in_specs": (P("batch"), P()), "out_specs": P("batch")}
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, check_vma=checked, **specs)
    close = jnp.full((4, 16), 1 + 2.0**-12)  # neither dtype can hold it
    ones = jnp.ones((16, 8))
    for function in (ampx_jax.autocast(mapped), jax.jit(ampx_jax.autocast(mapped))):
        np.testing.assert_array_equal(function(close, ones), np.full((4, 8), 16.0))
    np.testing.assert_array_equal(mapped(close, ones), np.full((4, 8), 16 + 2.0**-8))


@pytest.mark.parametrize(
    ("level", "compiled", "mesh_is_set"),
    [*((level, True, level == "O1") for level in ("O1", "O2", "O3")), ("O1", False, True), ("O1", False, False)],
)
def test_parameters_with_shardings_in_their_types_are_updated_and_skipped(level, compiled, mesh_is_set, quiet_end):
    """So are those that `jax.make_mesh` places by default."""
    amp = ampx.init("jax", dtype="bfloat16", level=level, device="cpu", loss_scale=8.0)
    amp.meter_every = 1
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Explicit,))
    places = {"weight": NamedSharding(mesh, P(None, "model")), "bias": NamedSharding(mesh, P())}
    start = jax.device_put({"weight": WEIGHT, "bias": np.ones(8, np.float32)}, places)
    tx = ampx.wrap_optimizer(optax.sgd(1.0), max_grad_norm=2.0**20)

    def step(params, state, slopes):
        scale = jnp.asarray(ampx.loss_scale(state))
        scaled = jax.tree.map(lambda slope: slope * scale.astype(slope.dtype), slopes)
        updates, state = tx.update(scaled, state, params)
        return optax.apply_updates(params, updates), state

    params, state = ampx.prepare(start, tx.init(start))
    slopes = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(step) if compiled else step
    types = jax.tree.map(jax.typeof, params)
    with jax.set_mesh(mesh) if mesh_is_set else contextlib.nullcontext():
        for factor, applied in ((1.0, True), (jnp.inf, False), (1.0, True)):
            params, state = step(params, state, jax.tree.map(lambda slope, factor=factor: slope * factor, slopes))
            assert ampx.last_step(state).applied is applied
    np.testing.assert_array_equal(params["weight"], WEIGHT - 2)
    assert jax.tree.map(jax.typeof, params) == types
    if level == "O3":
        assert [entry.moved for entry in ampx.meter(state).parameters] == [8, 128]


@pytest.mark.parametrize(
    ("flags", "native"),
    [({"avx512f", "avx512_bf16"}, True), ({"avx2", "amx_bf16"}, True), ({"avx512f", "avx2"}, False), (set(), False)],
)
def test_bfloat16_is_native_on_cpus_with_instructions_for_it_and_auto_is_float32_on_all(
    monkeypatch, nothing_of_its_own, flags, native
):
    """XLA gains from them in large products only, so that a session that names no dtype has float32, and says why."""
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))
    device = devices.describe("cpu")
    assert (device.native, device.emulated) == (
        (frozenset({"bfloat16"}), frozenset({"float16"})) if native else (frozenset(), {"float16", "bfloat16"})
    )
    assert device.details["instructions"] == [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]
    with pytest.warns(ampx.PrecisionWarning, match="ampx tune" if native else "no instructions"):
        amp = ampx.init("jax", device="cpu")
    with amp:
        assert amp.effective.dtype is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ampx.init("jax", device="cpu", dtype="bfloat16") as amp:
            assert amp.effective.native == native
    assert len(caught) == (not native)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        run = Run("jax", RunSettings(device="cpu"))
        with offer(ampx_jax.load(), Automation).automate(run):
            optax.sgd(0.1).init(WEIGHT)
            assert run.amp.effective.dtype is None


def test_a_session_on_a_cpu_lowers_for_a_gpu_what_suits_a_gpu(dtype):
    def loss(first, second):
        return jnp.sum(ampx_jax.autocast(lambda a, b: INPUTS @ a @ b)(first, second))

    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=["cuda"])(WEIGHT, WEIGHT.T)
    products = re.findall(r"dot_general .*: \((.*)\) -> tensor<\w+x(\w+)>", exported.mlir_module())
    low = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    assert all(re.findall(r"x(b?f\d+)>", factors) == [low, low] for factors, _ in products)
    # Low: the first product, and what flows back to it. Float32: the gradients of both weights.
    assert sorted(result for _, result in products) == sorted([low, low, "f32", "f32"])


def test_a_program_for_several_kinds_of_device_runs_here(dtype):
    exported = jax.export.export(jax.jit(gradient), platforms=["cuda", "cpu"])(WEIGHT, INPUTS, UPSTREAM)
    np.testing.assert_array_equal(exported.call(WEIGHT, INPUTS, UPSTREAM), INPUTS.T @ UPSTREAM)


def test_a_session_for_a_gpu_that_is_absent_is_refused_with_the_way_to_lower_for_one():
    if jax.default_backend() == "gpu":
        pytest.skip("JAX sees a GPU")
    with pytest.raises(ampx.UnsupportedDeviceError, match="device='cpu' and a dtype"):
        ampx.init("jax", device="cuda", dtype="bfloat16")


@pytest.mark.parametrize(
    ("platform", "capability", "kind"), [("tpu", None, "tpu"), ("METAL", None, "METAL"), ("gpu", "gfx942", "rocm")]
)
def test_accelerators_that_are_not_nvidias_are_refused_with_what_works_there(monkeypatch, platform, capability, kind):
    """What JAX calls these devices is written here by hand, because none is in the machine that runs this."""
    [host] = jax.devices("cpu")[:1]
    accelerator = SimpleNamespace(platform=platform, device_kind="an accelerator", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda backend=None: [host if backend == "cpu" else accelerator])
    for name in ("auto", "cuda"):
        with pytest.raises(ampx.UnsupportedDeviceError, match=f"device='{kind}' is not .* accepted: 'cpu'. Pass"):
            ampx.init("jax", device=name)
    with ampx.init("jax", device="cpu", dtype="bfloat16", on_unsupported="warn") as amp:
        assert amp.effective.dtype == "bfloat16"


def test_a_cpu_that_computes_bfloat16_says_why_float32_is_chosen_and_how_to_choose_otherwise(monkeypatch):
    """`doctor` prints the reason behind "chooses float32: mixed precision stays off on cpu. Why:"."""
    monkeypatch.setattr(devices, "cpu_flags", lambda: {"amx_bf16"})
    device = devices.describe("cpu")
    assert device.preferred is None
    against, _, advice = device.reason.partition(". ")
    assert "longer in bfloat16" in against
    assert "dtype='bfloat16'" in advice
