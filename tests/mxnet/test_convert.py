"""Trained models converted for inference: their oracle is the network in NumPy's float64, with its rounding errors.

bfloat16 keeps 8 significant bits, so rounding to nearest changes a number by at most U = 2**-8 of itself. `linear`
carries a bound on the error along with the value: operands, bias and output of a converted layer are each rounded once,
products accumulate in float32, whose own error the factor of `DELTA` covers many times over.
"""

import json

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

import ampx
import ampx_mxnet.amp
from ampx_mxnet.convert import convert_hybrid_block, convert_model

U = 2.0**-8
DELTA = (1 + U) ** 2 - 1 + 2.0**-16
SHAPE = (4, 2, 6, 6)
BATCH_NORM_EPSILON = 1e-3


def linear(product, weight, bias, value, error):
    """One converted layer: its value and a bound on its error; `product` is its product without bias."""
    exact = product(value, weight) + bias
    error = (
        (1 + DELTA) * product(error, abs(weight))
        + DELTA * product(abs(value), abs(weight))
        + U * abs(bias)  # the operands
    )
    return exact, error + U * (abs(exact) + error)  # the output


def convolve(images, kernel):
    windows = np.lib.stride_tricks.sliding_window_view(images, kernel.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,fcij->nfhw", windows, kernel)


def network(images, p):
    """Convolution, batch normalization, relu, fully connected: the value in float64 and the bound."""
    value, error = linear(convolve, p["c_weight"], p["c_bias"][:, None, None], images, np.zeros_like(images))
    slope = p["b_gamma"] / np.sqrt(p["b_var"] + BATCH_NORM_EPSILON)
    value = (value - p["b_mean"][:, None, None]) * slope[:, None, None] + p["b_beta"][:, None, None]
    error = error * abs(slope)[:, None, None]
    value = np.maximum(value, 0)
    flat = value.reshape(len(value), -1), error.reshape(len(value), -1)
    return linear(lambda a, w: a @ w.T, p["f_weight"], p["f_bias"], *flat)


@pytest.fixture
def images():
    return np.random.default_rng(1).uniform(0.0, 1.0, SHAPE).astype("float32")


@pytest.fixture
def parameters():
    """Float32 parameters, mostly of one sign, because cancellation would loosen the bound."""
    generator = np.random.default_rng(0)
    shapes = {"c_weight": (3, 2, 3, 3), "c_bias": (3,), "f_weight": (5, 48), "f_bias": (5,)}
    values = {name: generator.uniform(-0.1, 0.5, shape) for name, shape in shapes.items()}
    values |= {f"b_{name}": generator.uniform(0.5, 1.5, 3) for name in ("gamma", "beta", "mean", "var")}
    return {name: value.astype("float32") for name, value in values.items()}


@pytest.fixture
def symbol():
    """The network of the symbol API, with its parameters' names as in `parameters`."""
    x = mx.sym.Variable("data")
    x = mx.sym.Convolution(x, kernel=(3, 3), num_filter=3, name="c")
    x = mx.sym.BatchNorm(x, fix_gamma=False, eps=BATCH_NORM_EPSILON, name="b")
    x = mx.sym.Activation(x, act_type="relu", name="relu")
    return mx.sym.FullyConnected(x, num_hidden=5, name="f")


@pytest.fixture
def model(symbol, parameters):
    arg = {name: nd.array(value) for name, value in parameters.items() if name not in ("b_mean", "b_var")}
    aux = {f"b_moving_{name}": nd.array(parameters[f"b_{name}"]) for name in ("mean", "var")}
    return symbol, arg, aux


@pytest.fixture
def block(parameters, images):
    """The same network in Gluon, called before any session."""
    net = gluon.nn.HybridSequential(prefix="")
    net.add(
        gluon.nn.Conv2D(3, 3, in_channels=2, prefix="c_"),
        gluon.nn.BatchNorm(epsilon=BATCH_NORM_EPSILON, in_channels=3, prefix="b_"),
        gluon.nn.Activation("relu"),
        gluon.nn.Dense(5, in_units=48, prefix="f_"),
    )
    net.initialize()
    for name, parameter in net.collect_params().items():
        parameter.set_data(nd.array(parameters[name.replace("running_", "")]))
    net.hybridize()
    net(nd.array(images))
    return net


def run(model, images):
    symbol, arg, aux = model
    module = mx.mod.Module(symbol, label_names=None, context=mx.cpu())
    module.bind(data_shapes=[("data", SHAPE)], for_training=False)
    module.set_params(arg, aux)
    module.forward(mx.io.DataBatch([nd.array(images)]), is_train=False)
    (output,) = module.get_outputs()
    assert output.dtype == np.float32
    return output.asnumpy()


def dtype_name(array):
    return "bfloat16" if np.dtype(array.dtype).names else np.dtype(array.dtype).name


def check(output, images, parameters):
    exact, bound = network(images.astype("float64"), {k: v.astype("float64") for k, v in parameters.items()})
    assert (abs(output - exact) <= bound).all()
    # Were nothing rounded to bfloat16, the error would be that of float32, which is smaller by 2**16.
    assert abs(output - exact).max() > 2.0**-12
    assert bound.max() < 0.05 * abs(exact).max()  # the bound says something


def test_oracle_is_mxnets_network_in_float32(model, block, images, parameters):
    exact, _ = network(images, parameters)
    np.testing.assert_allclose(run(model, images), exact, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(block(nd.array(images)).asnumpy(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.bfloat16
@pytest.mark.parametrize("dtype", [None, "bfloat16", "bf16"])
@pytest.mark.parametrize("cast_parameters", [False, True])
def test_module_computes_in_bfloat16(model, images, parameters, dtype, cast_parameters):
    converted = convert_model(*model, dtype, cast_parameters=cast_parameters)
    check(run(converted, images), images, parameters)
    expected = "bfloat16" if cast_parameters else "float32"
    assert {name: dtype_name(value) for name, value in converted[1].items()} == {
        "c_weight": expected,
        "c_bias": expected,
        "b_gamma": "float32",
        "b_beta": "float32",
        "f_weight": expected,
        "f_bias": expected,
    }


@pytest.mark.bfloat16
@pytest.mark.parametrize("cast_parameters", [False, True])
@pytest.mark.parametrize("hybridize", [False, True])
def test_block_computes_in_bfloat16(block, images, parameters, cast_parameters, hybridize):
    converted = convert_hybrid_block(block, cast_parameters=cast_parameters)
    if hybridize:
        converted.hybridize(static_alloc=True)
    check(converted(nd.array(images)).asnumpy(), images, parameters)
    expected = "bfloat16" if cast_parameters else "float32"
    assert dtype_name(converted.collect_params()["f_weight"]) == expected


@pytest.mark.bfloat16
def test_what_is_converted_stays_as_it_was(model, block, images):
    symbol, arg, aux = model
    before = symbol.tojson(), list(arg.items()), list(aux.items())
    output = block(nd.array(images)).asnumpy()
    convert_model(symbol, arg, aux, cast_parameters=True)
    convert_hybrid_block(block, cast_parameters=True)
    assert symbol.tojson() == before[0]
    for now, then in zip([*arg.items(), *aux.items()], [*before[1], *before[2]], strict=True):
        assert now[0] == then[0]
        assert now[1] is then[1]
    np.testing.assert_array_equal(block(nd.array(images)).asnumpy(), output)
    assert {dtype_name(parameter.data()) for parameter in block.collect_params().values()} == {"float32"}


def test_native_conversion_writes_into_its_arguments(model):
    """The defect behind the copies: a model that was converted once is no float32 model any more."""
    symbol, arg, aux = model
    before = dict(arg)
    mx.contrib.amp.convert_model(symbol, arg, aux, "bfloat16", cast_optional_params=True)
    assert dtype_name(arg["f_weight"]) == "bfloat16"
    assert arg["f_weight"] is not before["f_weight"]


@pytest.mark.bfloat16
@pytest.mark.parametrize("lists", [{"deny": [nd.Convolution, "FullyConnected"]}, {"exclude": ["c", "f"]}])
def test_lists_keep_layers_in_float32(model, block, images, parameters, lists):
    exact, _ = network(images, parameters)
    np.testing.assert_allclose(run(convert_model(*model, **lists), images), exact, rtol=1e-4, atol=1e-5)
    names = {"exclude": ["c_fwd", "f_fwd"]} if "exclude" in lists else lists
    output = convert_hybrid_block(block, **names)(nd.array(images)).asnumpy()
    np.testing.assert_allclose(output, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.bfloat16
def test_allow_adds_an_operator(block, images):
    """An operator of MXNet's float32 list: its operand, which counts twice, is then rounded, and its output cut off."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.HybridLambda("square"))
    net.hybridize()
    x = nd.array(images)
    plain = net(x).asnumpy()
    output = convert_hybrid_block(net, "bfloat16", allow=["square"])(x).astype("float32").asnumpy()
    assert (output.view(np.uint32) & 0xFFFF == 0).all()
    assert not (plain.view(np.uint32) & 0xFFFF == 0).all()
    np.testing.assert_allclose(output, plain, rtol=(1 + U) ** 2 * (1 + 2 * U) - 1)


@pytest.mark.bfloat16
def test_conversion_is_the_same_while_casting_is_on(model, block, images, parameters):
    without = run(convert_model(*model), images), convert_hybrid_block(block)(nd.array(images)).asnumpy()
    with ampx.init("mxnet", dtype="bfloat16"):
        check(run(convert_model(*model), images), images, parameters)
        np.testing.assert_array_equal(run(convert_model(*model), images), without[0])
        np.testing.assert_array_equal(convert_hybrid_block(block)(nd.array(images)).asnumpy(), without[1])


@pytest.mark.bfloat16
@pytest.mark.parametrize("cast_parameters", [False, True])
def test_converted_model_is_saved_and_loaded(model, images, tmp_path, cast_parameters):
    converted = convert_model(*model, cast_parameters=cast_parameters)
    expected = run(converted, images)
    prefix = str(tmp_path / "model")
    mx.model.save_checkpoint(prefix, 3, *converted, remove_amp_cast=False)
    np.testing.assert_array_equal(run(mx.model.load_checkpoint(prefix, 3), images), expected)


# MXNet says so on import: it makes the block before it knows the input's dtype.
@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments:UserWarning")
@pytest.mark.bfloat16
@pytest.mark.parametrize("cast_parameters", [False, True])
def test_converted_block_is_exported_and_imported(block, images, tmp_path, cast_parameters):
    converted = convert_hybrid_block(block, cast_parameters=cast_parameters)
    x = nd.array(images)
    expected = converted(x).asnumpy()
    converted.hybridize()
    converted(x)
    prefix = str(tmp_path / "model")
    converted.export(prefix, 3, remove_amp_cast=False)
    loaded = gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0003.params", ctx=mx.cpu())
    np.testing.assert_array_equal(loaded(x).asnumpy(), expected)


SHIPPED = """
x = mx.sym.Variable("data")
x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=5, name="f"), act_type="tanh", name="t")
symbol = mx.sym.softmax(mx.sym.FullyConnected(x, num_hidden=2, name="g"), name="s")
arrays = {"f_weight": (5, 4), "f_bias": (5,), "g_weight": (2, 5), "g_bias": (2,)}
arrays = {name: mx.nd.random.normal(shape=shape) for name, shape in arrays.items()}
shown = []
for options in ({}, {"target_dtype": "float16"}, {"target_dtype": "float16", "cast_optional_params": True}):
    converted, arguments, _ = amp.convert_model(symbol, dict(arrays), {}, **options)
    shown.append([converted.tojson(), {name: str(array.dtype) for name, array in sorted(arguments.items())}])
    shown.append(amp.convert_symbol(symbol, **options).tojson())
"""


def test_scripts_convert_to_the_dtype_that_mxnet_would_also_where_the_machine_cannot_compute_it(native):
    """Models are converted for other machines, too; MXNet has no float16 on a CPU."""
    _, printed, _ = native(SHIPPED + "import json; print(json.dumps(shown))")
    expected = json.loads(printed)
    names = {"mx": mx, "amp": ampx_mxnet.amp}
    exec(SHIPPED, names)
    assert names["shown"] == expected


def test_a_block_is_converted_to_what_was_asked_for(block):
    for converted in (
        convert_hybrid_block(block, "float16", cast_parameters=True),
        ampx_mxnet.amp.convert_hybrid_block(block, cast_optional_params=True),
    ):
        assert "float16" in {dtype_name(parameter) for parameter in converted.collect_params().values()}


@pytest.mark.parametrize("convert", [convert_model, ampx_mxnet.amp.convert_model])
def test_float32_is_no_dtype_to_convert_to(model, convert):
    with pytest.raises(ampx.UnsupportedDtypeError, match="accepted: float16, bfloat16"):
        convert(*model, "float32")


def test_block_without_a_graph_is_refused():
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    for _ in range(2):
        with pytest.raises(ampx.InvalidOptionError, match=r"got Dense, which has no graph.*hybridize\(\)"):
            convert_hybrid_block(net)
        net.hybridize()  # not called yet
    with pytest.raises(ampx.InvalidOptionError, match="got Sequential, which has no graph"):
        convert_hybrid_block(gluon.nn.Sequential())


@pytest.mark.bfloat16
def test_model_that_is_low_precision_already_is_refused(model, block):
    message = r"4 parameters are not float32 \(c_bias, c_weight"
    with pytest.raises(ampx.InvalidOptionError, match=message):
        convert_model(*convert_model(*model, cast_parameters=True))
    with pytest.raises(ampx.InvalidOptionError, match=message):
        convert_hybrid_block(convert_hybrid_block(block, cast_parameters=True))


@pytest.mark.bfloat16
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deny": ["Dense"]}, ampx.UnsupportedOpError, "'Dense' is no operator of mxnet"),
        ({"deny": ["broadcast_add"]}, ampx.UnsupportedOpError, "converts no broadcast_add to or from bfloat16"),
        ({"allow": ["softmax"], "deny": ["softmax"]}, ampx.UnsupportedOpError, "allow and deny both name softmax"),
        ({"exclude": ["layer"]}, ampx.InvalidOptionError, "exclude names layer, which the graph does not contain"),
        ({"dtype": "float64"}, ampx.UnsupportedDtypeError, "float64"),
    ],
)
def test_wrong_option_is_refused(model, block, options, error, message):
    with pytest.raises(error, match=message):
        convert_model(*model, **options)
    with pytest.raises(error, match=message):
        convert_hybrid_block(block, **options)
