"""`ampx.convert` in JAX: parameters by what is done with them; what is converted is exported and read back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import ampx

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def parameters():
    rows = np.random.default_rng(1)
    weights = {name: rows.normal(size=shape) / 4 for name, shape in {"first": (8, 16), "rows": (3, 16, 16)}.items()}
    weights |= {"bias": rows.normal(size=16), "scale": np.ones(16), "last": rows.normal(size=(16, 2))}
    return {"count": jnp.arange(3), **{name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}}


def network(weights, x):
    """A product, normalization, a loop over layers, and a weight that is used twice, once in float32."""
    with jax.named_scope("inside"):
        x = x @ weights["first"] + weights["bias"]
        x = weights["scale"] * (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    x, _ = jax.lax.scan(lambda x, row: (jnp.tanh(x @ row), None), x, weights["rows"])
    with jax.named_scope("head"):
        return {"scores": x @ weights["last"], "length": jnp.square(weights["last"]).sum(), "n": weights["count"].sum()}


def dtypes(tree):
    return {name: str(leaf.dtype) for name, leaf in tree.items()}


def close(values, others, tolerance):
    for name in others:
        np.testing.assert_allclose(values[name], others[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_that_are_only_cast_are_stored_low(dtype):
    weights = parameters()
    apply, low = ampx.convert((network, weights), dtype, batches=[BATCH])
    wide = dict.fromkeys(("bias", "scale", "last"), "float32")
    assert dtypes(low) == {"count": "int32", "first": dtype, "rows": dtype, **wide}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(weights)} == {"int32", "float32"}
    outputs = jax.jit(apply)(low, BATCH)
    assert dtypes(outputs) == {"scores": "float32", "length": "float32", "n": "int32"}
    close(outputs, network(weights, BATCH), 0.02 if dtype == "float16" else 0.1)
    kept = ampx.convert((network, weights), dtype, batches=[BATCH], deny=["module:inside"])[1]
    assert dtypes(kept)["first"] == "float32"
    assert dtypes(kept)["rows"] == dtype
    assert set(dtypes(ampx.convert((network, weights), dtype, batches=[BATCH], deny=["dot_general"])[1]).values()) == {
        "int32",
        "float32",
    }


def test_a_converted_function_is_exported_and_read_back():
    apply, low = ampx.convert((network, parameters()), batches=[BATCH])
    rows = export.symbolic_shape("rows, 8")
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), low)
    blob = export.export(jax.jit(apply))(arguments, jax.ShapeDtypeStruct(rows, jnp.float32)).serialize()
    loaded = export.deserialize(blob)
    assert "tensor<8x16xf16>" in loaded.mlir_module()
    for batch in (BATCH, BATCH[:3]):
        close(loaded.call(low, batch), jax.jit(apply)(low, batch), 1e-6)


def test_the_compiled_function_casts_no_weight_up():
    apply, low = ampx.convert((lambda weights, x: x @ weights["first"], parameters()), batches=[BATCH])
    text = jax.jit(apply).lower(low, BATCH).compile().as_text()
    assert "f32[8,16]" not in text.split("ENTRY")[1].split("parameter(")[0]
    lowered = jax.jit(apply).lower(low, BATCH).as_text()
    assert "tensor<8x16xf16>" in lowered


def test_shared_parameters_stay_one():
    shared = parameters()["rows"][0]
    pair = (lambda weights, x: x @ weights["a"] @ weights["b"], {"a": shared, "b": shared})
    _, low = ampx.convert(pair, batches=[jnp.ones((2, 16))])
    assert low["a"] is low["b"]
    pair = (lambda weights, x: x @ weights["a"] + jnp.sin(weights["b"][0]), {"a": shared, "b": shared})
    _, kept = ampx.convert(pair, batches=[jnp.ones((2, 16))])
    assert kept["a"] is kept["b"] is shared


def test_an_overflow_is_refused_with_what_is_named():
    weights = {**parameters(), "last": parameters()["last"] * 60000}

    def scored(weights, x):
        with jax.named_scope("first"):
            x = jnp.abs(x @ weights["first"]) + 1
        with jax.named_scope("head"):
            return x @ weights["last"]

    with pytest.raises(ampx.ConversionError, match=r"weights that become infinite in float16: .*last"):
        ampx.convert((scored, {**weights, "last": weights["last"] * 10}), batches=[BATCH])
    weights["last"] = jnp.full((16, 2), 30000.0)
    with pytest.raises(ampx.ConversionError, match=r"not finite .*deny=\['module:head'\]"):
        ampx.convert((scored, weights), batches=[BATCH])
    apply, low = ampx.convert((scored, weights), batches=[BATCH], deny=["module:head"])
    assert bool(jnp.isfinite(apply(low, BATCH)).all())


def test_modules_of_flax_and_equinox_become_functions():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    equinox = pytest.importorskip("equinox", reason="equinox is not installed")
    model = nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    low = ampx.convert(model, batches=[BATCH])
    model.eval()
    np.testing.assert_allclose(jax.jit(low)(BATCH), model(BATCH), rtol=0.02, atol=0.02)
    assert sorted(str(leaf.dtype) for leaf in jax.tree.leaves(low)) == ["float16", *["float32"] * 5]
    layer = equinox.nn.MLP(8, 2, 4, 1, key=jax.random.key(0))
    low = ampx.convert(layer, batches=[BATCH[0]])
    np.testing.assert_allclose(low(BATCH[0]), layer(BATCH[0]), rtol=0.02, atol=0.02)
    assert sorted(str(leaf.dtype) for leaf in jax.tree.leaves(low)) == ["float16"] * 2 + ["float32"] * 2


@pytest.mark.parametrize(
    ("model", "options", "error", "said"),
    [
        ((network, {}), {}, ampx.InvalidOptionError, "no floating dtype"),
        ((network, {"a": jnp.ones(2, "float16")}), {}, ampx.InvalidOptionError, "float16"),
        (network, {}, ampx.InvalidOptionError, "a pair of a function and its parameters"),
        ((lambda weights, x: x[weights["nowhere"]], {"a": jnp.ones(2)}), {}, ampx.ConversionError, "cannot be traced"),
    ],
)
def test_what_is_no_float32_model_is_refused(model, options, error, said):
    with pytest.raises(error, match=said):
        ampx.convert(model, batches=[BATCH], framework="jax", **options)
