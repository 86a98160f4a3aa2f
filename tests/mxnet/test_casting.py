"""MXNet's amp switched on and off: everything comes back, and hybridized blocks follow."""

import logging

import numpy as np
import pytest

import ampx
from ampx.run import Run, RunSettings
from ampx_mxnet.compat import amp as native_amp, mx
from ampx_mxnet.devices import describe
from ampx_mxnet.dtypes import name_of
from ampx_mxnet.run import automate


def _modules():
    names = {}
    for module in (mx.ndarray, mx.symbol):
        parts = [getattr(module, prefix[1:-1]) for prefix in mx.base._OP_NAME_PREFIX_LIST]
        names |= {place.__name__: dict(vars(place)) for place in (module, module.op, module._internal, *parts)}
    places = (place for module in (mx.npx, mx.nd.npx, mx.sym.npx) for place in (module, module._op))
    return names | {place.__name__: dict(vars(place)) for place in places}


def _flags():
    names = ("_amp_initialized", "_amp_loss_scale_initialized", "_loss_scaler")
    places = (mx.gluon.HybridBlock, mx.gluon.SymbolBlock, mx.autograd, mx.nd.NDArray)
    return [getattr(native_amp.amp, name) for name in names], [dict(vars(place)) for place in places]


def _dtype(net):
    return name_of(net(mx.nd.ones((1, 2))).dtype)


@pytest.mark.bfloat16
def test_shutdown_restores_every_function(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's would keep MXNet from adding one
    before = _modules(), _flags()
    for options in ({}, {"deny": ["FullyConnected"]}, {"process_wide": False}):
        amp = ampx.init("mxnet", dtype="bfloat16", **options)
        with amp.autocast():
            assert _modules() != before[0]
        assert (_modules() == before[0]) is ("process_wide" in options)
        amp.shutdown()
        assert (_modules(), _flags()) == before
        assert logging.getLogger().handlers == []


@pytest.mark.bfloat16
def test_nothing_is_left_where_switching_on_fails(monkeypatch):
    before = _modules(), _flags()

    def fail(*args, **kwargs):
        raise RuntimeError("half way")

    monkeypatch.setattr(native_amp.amp, "_wrap_loss_output_functions", fail)
    with pytest.raises(RuntimeError, match="half way"):
        ampx.init("mxnet", dtype="bfloat16")
    assert (_modules(), _flags()) == before


@pytest.mark.bfloat16
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("traced_before", [False, True])
def test_hybridized_blocks_follow_the_switch(dense, static, traced_before):
    """A block in a block, traced before `init`, in a region, after it: every call computes as the moment says."""
    net = mx.gluon.nn.HybridSequential()
    net.add(dense())
    net.hybridize(static_alloc=static, static_shape=static)
    if traced_before:
        assert _dtype(net) == "float32"
    amp = ampx.init("mxnet", dtype="bfloat16")
    for _ in range(2):
        assert _dtype(net) == "bfloat16"
        with amp.autocast(enabled=False):
            assert _dtype(net) == "float32"
            with amp.autocast():
                assert _dtype(net) == "bfloat16"
    ampx.init("mxnet", dtype="bfloat16", deny=[mx.nd.FullyConnected])
    assert _dtype(net) == "float32"
    ampx.init("mxnet", dtype="bfloat16")
    assert _dtype(net) == "bfloat16"
    ampx.shutdown()
    assert _dtype(net) == "float32"


@pytest.mark.bfloat16
def test_a_graph_is_traced_once(dense):
    """Calls that change nothing keep the graph."""
    ampx.init("mxnet", dtype="bfloat16")
    net = dense()
    net.hybridize()
    net(mx.nd.ones((1, 2)))
    graph = net._cached_op
    net(mx.nd.ones((1, 2)))
    assert net._cached_op is graph


@pytest.mark.bfloat16
@pytest.mark.parametrize("layer", ["dense", "convolution"])
def test_numpy_reads_the_numbers_of_bfloat16_while_casting_is_on(layer):
    net = mx.gluon.nn.Dense(3) if layer == "dense" else mx.gluon.nn.Conv2D(2, 3)
    net.initialize(mx.init.Xavier())
    amp = ampx.init("mxnet", dtype="bfloat16")
    with mx.autograd.record():
        output = net(mx.nd.random.normal(shape=(2, 4) if layer == "dense" else (1, 1, 5, 5)))
        read = output.asnumpy()
    assert read.dtype == np.float32
    metric = mx.metric.MAE()
    metric.update(mx.nd.zeros(output.shape), output)
    assert output[0].max().asscalar() == read[0].max()
    assert str(output).split("<")[0].split() == str(mx.nd.array(read)).split("<")[0].split()
    amp.shutdown()
    bits = output.astype("float32").asnumpy() if layer == "convolution" else _numbers(output)
    np.testing.assert_array_equal(read, bits)
    assert metric.get()[1] == pytest.approx(abs(bits).mean())


def _numbers(array):
    """Read an array in bfloat16 as plain MXNet gives it to NumPy: its bits are the upper half of float32's."""
    return (array.asnumpy()["bfloat16"].astype(np.uint32) << 16).view(np.float32)


# MXNet builds an imported block before the dtype of its input is known.
IMPORTS = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments:UserWarning")
# In bfloat16, whose digits are eight, it is 1.
FINE = 1 + 2.0**-10


@pytest.fixture
def imported(tmp_path):
    """A dense layer of weights 1, exported and imported again."""
    net = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    net.hybridize()
    net(mx.nd.ones((1, 2)))
    net.export(str(tmp_path / "net"))
    return mx.gluon.SymbolBlock.imports(f"{tmp_path}/net-symbol.json", ["data"], f"{tmp_path}/net-0000.params")


@pytest.mark.bfloat16
@IMPORTS
@pytest.mark.parametrize("inside", [False, True])
def test_imported_symbol_blocks_follow_the_switch(imported, inside):
    """As a network, and as the first block of one that is hybridized."""
    net = imported
    if inside:
        net = mx.gluon.nn.HybridSequential()
        net.add(imported, mx.gluon.nn.Activation("relu"))
        net.hybridize()

    def output():
        return net(mx.nd.full((1, 2), FINE)).asnumpy().tolist()

    assert output() == [[2 * FINE]]
    amp = ampx.init("mxnet", dtype="bfloat16")
    for _ in range(2):
        assert output() == [[2.0]]
        with amp.autocast(enabled=False):
            assert output() == [[2 * FINE]]
    ampx.init("mxnet", dtype="bfloat16", deny=["FullyConnected"])
    assert output() == [[2 * FINE]]
    ampx.init("mxnet", dtype="bfloat16")
    assert output() == [[2.0]]
    ampx.shutdown()
    assert output() == [[2 * FINE]]


@pytest.mark.bfloat16
@IMPORTS
def test_an_imported_symbol_block_trains_and_is_exported_as_it_was(imported, tmp_path):
    before = imported._cached_graph[1].tojson()
    ampx.init("mxnet", dtype="bfloat16")
    with mx.autograd.record():
        loss = imported(mx.nd.full((1, 2), FINE)).sum()
    loss.backward()
    (weight,) = imported.collect_params().values()
    assert weight.grad().dtype == np.float32
    assert weight.grad().asnumpy().tolist() == [[1.0, 1.0]]
    imported.export(str(tmp_path / "again"))
    ampx.shutdown()
    assert imported._cached_graph[1].tojson() == before
    again = mx.gluon.SymbolBlock.imports(f"{tmp_path}/again-symbol.json", ["data"], f"{tmp_path}/again-0000.params")
    assert again(mx.nd.full((1, 2), FINE)).asnumpy().tolist() == [[2 * FINE]]


@pytest.mark.bfloat16
def test_a_symbol_block_that_has_casts_keeps_them():
    data = mx.sym.amp_cast(mx.sym.var("data", dtype="float32"), dtype="float32")
    block = mx.gluon.SymbolBlock(
        mx.sym.FullyConnected(data, num_hidden=1, no_bias=True, name="fc"), mx.sym.var("data", dtype="float32")
    )
    block.initialize(mx.init.One())
    ampx.init("mxnet", dtype="bfloat16")
    assert block(mx.nd.full((1, 2), FINE)).asnumpy().tolist() == [[2 * FINE]]


@pytest.mark.bfloat16
def test_a_symbol_block_with_an_allowed_operator_that_mxnet_cannot_convert_is_refused():
    data = mx.sym.var("data", dtype="float32")
    block = mx.gluon.SymbolBlock(mx.sym.cumsum(data), data)
    ampx.init("mxnet", dtype="bfloat16", allow=["cumsum"])
    with pytest.raises(ampx.UnsupportedOpError, match="converts no cumsum"):
        block(mx.nd.ones((1, 2)))


@pytest.fixture
def numpy_arrays():
    mx.npx.set_np()
    yield
    mx.npx.reset_np()


@pytest.mark.bfloat16
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("layer", ["dense", "convolution"])
def test_layers_of_numpy_arrays_multiply_in_bfloat16_and_return_float32(numpy_arrays, layer, hybridized):
    if layer == "dense":
        net, x = mx.gluon.nn.Dense(1, in_units=2, use_bias=False), mx.np.full((1, 2), FINE)
    else:
        net, x = mx.gluon.nn.Conv2D(1, (1, 2), in_channels=1, use_bias=False), mx.np.full((1, 1, 1, 2), FINE)
    net.initialize(mx.init.One())
    net.hybridize(hybridized)
    assert net(x).item() == 2 * FINE
    amp = ampx.init("mxnet", dtype="bfloat16")
    for _ in range(2):
        with mx.autograd.record():
            output = net(x)
        output.backward()
        assert output.dtype == np.float32
        assert type(output) is mx.np.ndarray
        assert output.item() == 2.0
        assert net.weight.grad().asnumpy().ravel().tolist() == [1.0, 1.0]
        with amp.autocast(enabled=False):
            assert net(x).item() == 2 * FINE
    ampx.init("mxnet", dtype="bfloat16", deny=["FullyConnected", "Convolution"])
    assert net(x).item() == 2 * FINE
    ampx.shutdown()
    assert net(x).item() == 2 * FINE


class Products(mx.gluon.HybridBlock):
    """Multiplies what a layer returns with itself, as an attention does: of ones the results are exact."""

    def __init__(self, multiply):
        super().__init__()
        self._multiply = multiply
        self.layer = mx.gluon.nn.Dense(6, in_units=2, flatten=False, weight_initializer="ones")

    def hybrid_forward(self, operators, x):
        return self._multiply(operators, self.layer(x))


PRODUCTS = {
    "dot": (lambda nd, x: nd.dot(x, x, transpose_b=True), (1, 2), [[24.0]]),
    "batch_dot": (lambda nd, x: nd.batch_dot(x, x, transpose_b=True), (1, 1, 2), [[[24.0]]]),
    "attention": (lambda nd, x: nd.contrib.interleaved_matmul_selfatt_qk(x, heads=1), (1, 1, 2), [[[2**1.5 * 2]]]),
    "remainder": (lambda nd, x: nd.broadcast_mod(x * 3.5, x), (1, 2), [[1.0] * 6]),
}


@pytest.mark.bfloat16
@pytest.mark.parametrize("way", ["one by one", "hybridized", pytest.param("imported", marks=IMPORTS)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_has_no_kernel_in_bfloat16_computes_in_float32(tmp_path, name, way):
    multiply, shape, expected = PRODUCTS[name]
    net, x = Products(multiply), mx.nd.ones(shape)
    net.initialize()
    if way != "one by one":
        net.hybridize()
    with mx.autograd.record():
        loss = net(x).sum()
    loss.backward()
    gradient = net.layer.weight.grad().asnumpy()
    if way == "imported":
        net.export(str(tmp_path / "net"))
        net = mx.gluon.SymbolBlock.imports(f"{tmp_path}/net-symbol.json", ["data"], f"{tmp_path}/net-0000.params")
    ampx.init("mxnet", dtype="bfloat16")
    with mx.autograd.record():
        output = net(x)
        loss = output.sum()
    loss.backward()
    assert output.dtype == np.float32
    np.testing.assert_allclose(output.asnumpy(), expected, rtol=1e-6)
    weight = next(value for key, value in net.collect_params().items() if key.endswith("weight"))
    np.testing.assert_allclose(weight.grad().asnumpy(), gradient, rtol=2.0**-7)  # rounded to eight digits


@pytest.mark.bfloat16
def test_hybridized_recurrent_layers_compute_in_float32():
    """They make their first states of zeros, which take no arrays that could be cast."""
    net = mx.gluon.rnn.LSTM(2, input_size=2)
    net.initialize(mx.init.One())
    x = mx.nd.ones((3, 1, 2))
    expected = net(x).asnumpy().tolist()
    whole = mx.gluon.nn.HybridSequential()
    whole.add(net)
    whole.hybridize()
    ampx.init("mxnet", dtype="bfloat16")
    assert whole(x).asnumpy().tolist() == expected


@pytest.mark.bfloat16
def test_symbols_are_cast_where_arrays_are():
    def inside():
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc")
        return sum("amp_cast" in name for name in symbol.get_internals().list_outputs())

    assert inside() == 0
    amp = ampx.init("mxnet", dtype="bfloat16")
    assert inside() > 0
    with amp.autocast(enabled=False):
        assert inside() == 0


@pytest.mark.bfloat16
def test_float16_on_the_cpu_is_refused_with_the_reason():
    running = ampx.init("mxnet", dtype="bfloat16", device="cpu")
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"float16.*supported: bfloat16"):
        ampx.init("mxnet", dtype="float16", device="cpu")
    assert ampx.current("mxnet") is running
    with pytest.warns(ampx.PrecisionWarning, match="falling back to bfloat16"):
        amp = ampx.init("mxnet", dtype="float16", device="cpu", on_unsupported="warn")
    assert amp.effective.dtype == "bfloat16"
    assert "no float16 matrix kernels" in amp.backend.device("cpu").reason


@pytest.mark.bfloat16
def test_mxnets_own_init_is_refused(native):
    code, out, _ = native(
        "import ampx\namp.init('bfloat16')\ntry:\n    ampx.init('mxnet', dtype='bfloat16')\n"
        "except ampx.ProtocolError as error:\n    print(error)\n"
    )
    assert code == 0
    assert "Remove amp.init" in out


def test_a_name_that_is_almost_an_operators_is_answered_with_it():
    with pytest.raises(ampx.UnsupportedOpError, match=r"'sofmax' is no operator of mxnet.* Did you mean 'softmax'\?$"):
        ampx.init("mxnet", dtype="float32", deny=["sofmax"])


@pytest.mark.bfloat16
def test_op_lists_take_names_and_functions():
    for entry in ("FullyConnected", mx.nd.FullyConnected, mx.sym.FullyConnected):
        amp = ampx.init("mxnet", dtype="bfloat16", deny=[entry])
        assert amp.plan.deny == ("FullyConnected",)
        # The same function while casting is on is another object.
        assert ampx.init("mxnet", dtype="bfloat16", deny=[mx.nd.FullyConnected]).plan.deny == ("FullyConnected",)
    amp = ampx.init("mxnet", dtype="bfloat16", deny=[mx.nd.linalg.gemm2])
    assert amp.plan.deny == ("_linalg_gemm2",)
    for wrong in ("NoSuchOperator", "float32", print):
        with pytest.raises(ampx.UnsupportedOpError, match="is no operator of mxnet"):
            ampx.init("mxnet", dtype="bfloat16", allow=[wrong])
    with pytest.raises(ampx.UnsupportedOpError, match="both name FullyConnected"):
        ampx.init("mxnet", dtype="bfloat16", allow=["FullyConnected"], deny=["FullyConnected"])


@pytest.mark.bfloat16
def test_operators_that_make_their_own_gradient_need_a_scale_of_one(dense):
    """Their gradient does not come through the loss, so nothing would scale it."""
    data, label = mx.nd.ones((2, 2)), mx.nd.ones((2,))
    for loss_scale, works in ((1.0, True), ("dynamic", False)):
        amp = ampx.init("mxnet", dtype="bfloat16", loss_scale=loss_scale)
        opt = amp.wrap_optimizer(mx.gluon.Trainer(dense().collect_params(), "sgd"))
        if works:
            assert mx.nd.SoftmaxOutput(data, label).asnumpy().tolist() == [[0.5, 0.5]] * 2
        else:
            with pytest.raises(ampx.UnsupportedByBackendError, match="SoftmaxOutput makes its own gradient"):
                mx.nd.SoftmaxOutput(data, label)
        assert opt.loss_scale in (1.0, 2.0**16)


@pytest.mark.bfloat16
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("how", ["one by one", "one by one through autograd", "together"])
def test_gradients_add_over_several_backwards_of_one_body(dense, hybridize, how):
    """Three losses of slope 1: MXNet's cast to bfloat16 alone would leave the gradients zero."""
    amp = ampx.init("mxnet", dtype="bfloat16", loss_scale="dynamic")
    net = dense(grad_req="add")
    net.hybridize(hybridize)
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125}))
    for after in (0.625, 0.25):
        with mx.autograd.record():
            losses = [net(mx.nd.ones((1, 2))).astype("float32").sum() for _ in range(3)]
        with ampx.scale_loss(losses, opt) as scaled:
            if how == "together":
                mx.autograd.backward(scaled)
            for loss in scaled if how != "together" else ():
                loss.backward() if how == "one by one" else mx.autograd.backward([loss])
        opt.step(1)
        opt.zero_grad()
        assert net.weight.data().asnumpy().tolist() == [[after, after]]


@pytest.mark.bfloat16
def test_gradients_that_begin_to_add_after_wrapping_are_refused(dense):
    amp = ampx.init("mxnet", dtype="bfloat16", loss_scale="dynamic")
    net = dense()
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd"))
    net.collect_params().setattr("grad_req", "add")
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 2))).astype("float32").sum()
    with pytest.raises(ampx.ProtocolError, match="grad_req='add'"), ampx.scale_loss(loss, opt):
        pass


@pytest.mark.parametrize("limit", ["SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_MIC", "AVX512_MIC_4OPS"])
def test_a_cpu_whose_instructions_are_limited_computes_no_bfloat16(monkeypatch, limit):
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
    cpu = describe("cpu")
    assert not cpu.native | cpu.emulated
    assert limit in cpu.reason


def test_without_onednn_a_cpu_computes_no_bfloat16_and_casts_still_round(native, monkeypatch):
    """MXNet itself then cuts the digits off."""
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)  # which would be the reason then
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    monkeypatch.setenv("MXNET_STORAGE_FALLBACK_LOG_VERBOSE", "0")
    code, out, err = native(
        """
import ampx
from ampx_mxnet.dtypes import cast_tensor
with ampx.init("mxnet", device="cpu") as amp:
    print(amp.effective.dtype, "MXNET_MKLDNN_ENABLED" in amp.effective.reason)
third = nd.array([1 / 3, -1 / 3, float("inf"), 3.4e38])
third.attach_grad()
with autograd.record():
    low = cast_tensor(third, "bfloat16")
    cast_tensor(low, "float32").backward()
print(cast_tensor(low, "float32").asnumpy().tolist(), third.grad.asnumpy().tolist())
print(nd.amp_cast(third, dtype=low.dtype).astype("float32").asnumpy().tolist()[0])
"""
    )
    assert code == 0, err
    assert out.splitlines() == ["None True", "[0.333984375, -0.333984375, inf, inf] [1.0, 1.0, 1.0, 1.0]", "0.33203125"]


def test_bfloat16_is_refused_where_onednn_may_not_use_what_it_needs(native, monkeypatch):
    """MXNet itself fails when somebody waits for the product."""
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    code, _, err = native(
        """
ones = nd.amp_cast(nd.ones((8, 8)), dtype=np.dtype([("bfloat16", np.uint16)]))
nd.FullyConnected(ones, ones, no_bias=True, num_hidden=8).wait_to_read()
"""
    )
    assert code != 0
    assert "MXNetError" in err
    code, out, err = native(
        """
import ampx
try:
    ampx.init("mxnet", dtype="bfloat16")
except ampx.UnsupportedDtypeError:
    print("refused")
print(ampx.init("mxnet").effective.dtype)
"""
    )
    assert code == 0, err
    assert out.splitlines()[-2:] == ["refused", "None"]


class Behind(mx.autograd.Function):
    """A custom function that does nothing."""

    def forward(self, values):
        return values.copy()

    def backward(self, slope):
        return slope


@pytest.mark.bfloat16
def test_a_custom_function_of_low_precision_values_hands_its_gradient_on():
    weight, inputs = mx.nd.array([[2.0]]), mx.nd.ones((32, 1))
    weight.attach_grad()
    ampx.init("mxnet", dtype="bfloat16")
    for _ in range(3):
        with mx.autograd.record():
            loss = Behind()(mx.nd.FullyConnected(inputs, weight, num_hidden=1, no_bias=True)).astype("float32").sum()
        loss.backward()
        assert weight.grad.asscalar() == 32.0


@pytest.mark.bfloat16
@pytest.mark.parametrize("automated", [False, True])
def test_a_gradient_penalty_on_what_is_cast_is_refused_and_trains_in_float32(weights, automated):
    """MXNet's casts have no second derivative, which its own error tells in the name of an internal operator."""
    parameter = weights(1.0, 2.0)
    x = mx.nd.array([[3.0, 4.0]])
    x.attach_grad()

    def penalty():
        product = mx.nd.FullyConnected(x, parameter.data().reshape((1, 2)), no_bias=True, num_hidden=1)
        (slope,) = mx.autograd.grad(product, [x], create_graph=True, retain_graph=True)
        return (slope**2).sum()

    if automated:
        run = Run("mxnet", RunSettings(dtype="bfloat16", device="cpu"))
        with automate(run):
            mx.gluon.Trainer([parameter], "sgd", {"learning_rate": 0.5})
            with mx.autograd.record():
                loss = penalty()
            with pytest.raises(ampx.RunRefusedError, match=r"no second derivative; .*autocast\(enabled=False\)"):
                loss.backward()
        return
    amp = ampx.init("mxnet", dtype="bfloat16", loss_scale=4.0)
    opt = amp.wrap_optimizer(mx.gluon.Trainer([parameter], "sgd", {"learning_rate": 0.125}))
    with mx.autograd.record():
        loss = penalty()
        with (
            pytest.raises(ampx.UnsupportedByBackendError, match=r"no second derivative"),
            ampx.scale_loss(loss, opt) as scaled,
        ):
            scaled.backward()
        with amp.autocast(enabled=False):
            loss = penalty()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
    opt.step(1)
    assert parameter.data().asnumpy().tolist() == [0.75, 1.5]  # less an eighth of two weights
