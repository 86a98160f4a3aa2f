"""Levels O2 and O3: parameters in low precision, float32 norms, master weights, checkpoints."""

import copy
import pickle

import numpy as np
import pytest

import ampx
from ampx.backend import CastPlan
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import DTYPES, cast_tensor, name_of
from ampx_mxnet.low_precision import low_parameters
from ampx_mxnet.prepare import prepare

gluon, autograd, nn = mx.gluon, mx.autograd, mx.gluon.nn
bfloat16 = pytest.mark.bfloat16


def init(level="O2", **options):
    return ampx.init("mxnet", dtype="bfloat16", level=level, **options)


def network(shapes=True, hybridize=False):
    """Has layers of every kind that stays in float32, and some that MXNet computes in no bfloat16."""

    def units(**options):
        return options if shapes else {}

    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(
            nn.Dense(6, flatten=False, **units(in_units=4)),
            nn.LayerNorm(**units(in_channels=6)),
            nn.HybridLambda(lambda space, x: space.transpose(x, axes=(0, 2, 1))),
            nn.Conv1D(4, 3, **units(in_channels=6)),
            nn.BatchNorm(**units(in_channels=4)),
            nn.GroupNorm(2),
            nn.InstanceNorm(**units(in_channels=4)),
            nn.Activation("relu"),
            nn.Dense(2, **units(in_units=12)),
        )
    net.initialize(mx.init.Xavier())
    net.hybridize(hybridize)
    return net


def trainer_of(net, name="sgd", **options):
    options = {"learning_rate": 0.125, **({"momentum": 0.5} if name == "sgd" else {}), **options}
    return gluon.Trainer(net.collect_params(), name, options)


def batch(seed):
    return mx.nd.array(np.random.RandomState(seed).randn(8, 5, 4))


def mean_square(output):
    return output.square().mean()


def backward(net, inputs, opt, loss_of=mx.nd.sum):
    """Run the backward of a scaled loss of what a network returns."""
    with autograd.record():
        loss = loss_of(net(inputs))
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()


def train(net, opt, steps=3, start=0):
    for seed in range(start, start + steps):
        backward(net, batch(seed), opt, mean_square)
        opt.step(1)
        assert opt.last_step.applied


def trained(*, hybridize=False, first="prepare", **options):
    amp = init(**options)
    net = network(hybridize=hybridize)
    opt = trainer_of(net)
    if first == "wrap":
        opt = amp.wrap_optimizer(opt)
    net, opt = amp.prepare(net, opt)
    if first == "prepare":
        opt = amp.wrap_optimizer(opt)
    train(net, opt)
    return amp, net, opt


def parameters(net):
    return net._collect_params_with_prefix()


def dtypes(net):
    return {name: name_of(parameter.data().dtype) for name, parameter in parameters(net).items()}


def own(net):
    """Read the values that the network computes with."""
    return {name: cast_tensor(p.data(), "float32").asnumpy() for name, p in parameters(net).items()}


def saved(net, folder):
    net.save_parameters(str(folder / "saved"))
    return {name: values.asnumpy() for name, values in mx.nd.load(str(folder / "saved")).items()}


def momenta(opt):
    return {number: state.asnumpy() for number, state in opt._updaters[0].states.items()}


def assert_same(values, others):
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert value.dtype == others[name].dtype, name
        assert np.array_equal(value, others[name]), name


def rounded(values):
    """Round to bfloat16 by NumPy: to nearest, ties to even."""
    bits = np.asarray(values, "float32").view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view("float32")


# -- dtypes ----------------------------------------------------------------------------------------


@bfloat16
@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("hybridize", [False, True])
def test_o2_lowers_everything_but_norms(shapes, hybridize):
    amp = init()
    net = network(shapes, hybridize)
    opt = amp.wrap_optimizer(amp.prepare(net, trainer_of(net))[1])
    train(net, opt, 1)
    low = {name for name, dtype in dtypes(net).items() if dtype == "bfloat16"}
    assert low == {f"{layer}.{part}" for layer in (0, 3, 8) for part in ("weight", "bias")}


@bfloat16
@pytest.mark.parametrize("hybridize", [False, True])
def test_o3_lowers_everything_but_batch_normalization_and_keeps_no_masters(hybridize):
    """Gluon's own `cast` leaves batch normalization in float32, too."""
    amp = init("O3")
    net = network(hybridize=hybridize)
    opt = amp.wrap_optimizer(amp.prepare(net, trainer_of(net))[1])
    train(net, opt, 1)
    assert {name for name, dtype in dtypes(net).items() if dtype == "float32"} == {
        f"4.{part}" for part in ("gamma", "beta", "running_mean", "running_var")
    }
    assert all(parameter.ampx_masters is None for parameter in low_parameters(net.collect_params().values()))
    assert opt.loss_scale == 1.0
    assert net(batch(0)).dtype == np.float32


@bfloat16
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_indices_are_not_rounded_and_outputs_are_float32(level, hybridize):
    """MXNet's indices are floats as a rule; 257 is none of bfloat16's numbers."""
    amp = init(level)
    net = nn.HybridSequential()
    net.add(nn.Embedding(300, 1))
    net.initialize(mx.init.Zero())
    net[0].weight.data()[257] = 1.0
    net.hybridize(hybridize)
    amp.prepare(net)
    output = net(mx.nd.array([256.0, 257.0, 258.0]))
    assert name_of(net[0].weight.data().dtype) == "bfloat16"
    assert output.dtype == np.float32
    assert output.asnumpy().flatten().tolist() == [0.0, 1.0, 0.0]


@bfloat16
def test_statistics_of_batch_normalization_move_as_in_float32():
    amp = init()
    nets = [nn.HybridSequential() for _ in range(2)]
    for net in nets:
        net.add(nn.BatchNorm(in_channels=4))
        net.initialize()
    amp.prepare(nets[0])
    for net in nets:
        with autograd.record():
            loss = net(batch(0).reshape((-1, 4))).sum()
        loss.backward()  # in which MXNet moves them
    assert_same(own(nets[0]), own(nets[1]))
    assert own(nets[0])["0.running_mean"].any()


@bfloat16
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_denied_blocks_stay_in_float32_and_allowed_norms_do_not(level):
    amp = init(level, deny=["module:8"], allow=["module:1"])
    net = network()
    opt = amp.wrap_optimizer(amp.prepare(net, trainer_of(net))[1])
    train(net, opt, 1)
    kinds = dtypes(net)
    assert (kinds["8.weight"], kinds["1.gamma"], kinds["0.weight"]) == ("float32", "bfloat16", "bfloat16")


@bfloat16
def test_a_denied_block_computes_in_float32_where_it_is_called_by_itself_before_its_network():
    init("O1", deny=["module:8"])
    net = network()
    rows = mx.nd.ones((2, 12))
    first, denied = name_of(net[0](mx.nd.ones((2, 4))).dtype), name_of(net[8](rows).dtype)
    assert (first, denied) == ("bfloat16", "float32")


@bfloat16
def test_a_pattern_that_matches_no_block_is_refused():
    with pytest.raises(ampx.UnsupportedOpError, match="nowhere"):
        init(deny=["module:nowhere"]).prepare(network())


@bfloat16
def test_the_products_of_a_prepared_network_are_computed_in_bfloat16():
    """Equal to those of float32 numbers that were rounded by NumPy, up to the rounding of the result."""
    amp = init()
    net = nn.Dense(3, in_units=4, use_bias=False)
    net.initialize(mx.init.Normal(1.0))
    weight = net.weight.data().asnumpy()
    x = batch(0).reshape((-1, 4))
    amp.prepare(net)
    exact = rounded(x.asnumpy()) @ rounded(weight).T
    output = net(x).asnumpy()
    assert np.array_equal(output, rounded(output))
    # Half a unit in the last of eight places, where the sum is not the product of one rounding only.
    np.testing.assert_allclose(output, exact, rtol=2.0**-7, atol=2.0**-7)
    assert not np.array_equal(exact, x.asnumpy() @ weight.T)


# -- master weights --------------------------------------------------------------------------------


@bfloat16
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_small_updates_add_up_in_the_masters(first, clips, scale, tmp_path):
    amp = init(loss_scale=scale)
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    opt = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-14})
    options = {"max_grad_norm": 100.0} if clips else {}
    if first == "wrap":
        opt = amp.wrap_optimizer(opt, **options)
    net, opt = amp.prepare(net, opt)
    if first == "prepare":
        opt = amp.wrap_optimizer(opt, **options)
    for _ in range(64):
        backward(net, mx.nd.ones((1, 1)), opt)
        opt.step(1)
    # 64 steps of 2**-14: each is lost in bfloat16, the sum is exact.
    assert saved(net, tmp_path)["weight"].item() == 1 - 2.0**-8
    assert own(net)["weight"].item() == rounded([1 - 2.0**-8]).item()


@bfloat16
def test_o3_has_no_masters_that_such_updates_add_up_in():
    amp = init("O3")
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    net, opt = amp.prepare(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-14}))
    opt = amp.wrap_optimizer(opt)
    for _ in range(3):
        backward(net, mx.nd.ones((1, 1)), opt)
        opt.step(1)
    assert own(net)["weight"].item() == 1.0


@bfloat16
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam", "nag", "rmsprop", "lamb"])
def test_training_equals_masters_written_by_hand(name, hybridize):
    """The gradients are those of a network with rounded weights; a plain float32 trainer gets them."""
    amp = init()
    net, plain = (nn.HybridSequential() for _ in range(2))
    for block in (net, plain):
        block.add(nn.Dense(4, in_units=4, flatten=False), nn.Dense(2, in_units=4, flatten=False))
        mx.random.seed(1)
        block.initialize(mx.init.Xavier())
    net.hybridize(hybridize)
    net, raw = amp.prepare(net, trainer_of(net, name))
    opt, trainer = amp.wrap_optimizer(raw), trainer_of(plain, name)
    for seed in range(4):
        backward(net, batch(seed), opt, mean_square)
        opt.step(1)
        for low, parameter in zip(net.collect_params().values(), plain.collect_params().values(), strict=True):
            parameter.grad()[:] = cast_tensor(low.grad(), "float32")
            parameter.data()._fresh_grad = True
        trainer.step(1)
        for low, parameter in zip(net.collect_params().values(), plain.collect_params().values(), strict=True):
            assert np.array_equal(cast_tensor(low.data(), "float32").asnumpy(), rounded(parameter.data().asnumpy()))
            assert np.array_equal(low.ampx_masters[0].asnumpy(), parameter.data().asnumpy())


def rewrite(net):
    net.weight.set_data(mx.nd.full((2, 4), 0.3))


def rewrite_low(net):
    net.weight.set_data(cast_tensor(mx.nd.full((2, 4), 0.3), "bfloat16"))


def rewrite_in_place(net):
    net.weight.data()[:] = cast_tensor(mx.nd.full((2, 4), 0.3), "bfloat16")


def initialize(net):
    net.initialize(mx.init.Constant(0.3), force_reinit=True)


@bfloat16
@pytest.mark.parametrize("write", [rewrite, rewrite_low, rewrite_in_place, initialize])
def test_weights_written_between_prepare_and_the_first_step_count(write, tmp_path):
    amp = init(loss_scale=1024.0)
    net = nn.Dense(2, in_units=4, use_bias=False)
    net.initialize(mx.init.Normal(1.0))
    net, raw = amp.prepare(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}))
    opt = amp.wrap_optimizer(raw)
    write(net)
    for _ in range(2):
        backward(net, mx.nd.full((1, 4), 0.25), opt)
        opt.step(1)
    exact = write in (rewrite, initialize)
    start = np.full((2, 4), 0.3, "float32") if exact else rounded(np.full((2, 4), 0.3))
    expected = start - np.float32(0.125) - np.float32(0.125)
    assert np.array_equal(saved(net, tmp_path)["weight"], expected)


@bfloat16
def test_a_row_written_before_the_first_step_leaves_the_other_masters_exact(tmp_path):
    amp = init()
    net = nn.Dense(2, in_units=4, use_bias=False)
    net.initialize(mx.init.Normal(1.0))
    exact = net.weight.data().asnumpy()
    amp.prepare(net, gluon.Trainer(net.collect_params(), "sgd"))
    net.weight.data()[0] = 0.0
    before = saved(net, tmp_path)["weight"]
    assert np.array_equal(before, np.stack([np.zeros(4, "float32"), exact[1]]))
    assert np.array_equal(net.weight.ampx_masters[0].asnumpy(), exact)  # saving changes nothing


@bfloat16
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_leaves_masters_network_and_states_bit_identical(clips, hybridize, tmp_path):
    amp = init(loss_scale="dynamic")
    net = network(hybridize=hybridize)
    net, raw = amp.prepare(net, trainer_of(net))
    opt = amp.wrap_optimizer(raw, **({"max_grad_norm": 1.0} if clips else {}))
    train(net, opt, 2)
    # The statistics of batch normalization move in every forward, with MXNet alone, too.
    trains = {name for name, parameter in parameters(net).items() if parameter.grad_req != "null"}
    before = [{k: v for k, v in values.items() if k in trains} for values in (own(net), saved(net, tmp_path))]
    states, scale = momenta(opt), opt.loss_scale
    backward(net, batch(0), opt, lambda output: (output * float("inf")).sum())
    opt.step(1)
    assert not opt.last_step.applied
    assert opt.loss_scale == scale / 2
    after = [{k: v for k, v in values.items() if k in trains} for values in (own(net), saved(net, tmp_path))]
    assert_same(after[0], before[0])
    assert_same(after[1], before[1])
    assert_same(momenta(opt), states)
    train(net, opt, 1)


@bfloat16
def test_true_gradients_are_float32_and_accumulate():
    """Divided by the scale in bfloat16 they would lose nothing, but a clipped norm would be rounded."""
    amp = init(loss_scale=1024.0)
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    net, raw = amp.prepare(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}))
    opt = amp.wrap_optimizer(raw)
    inputs = mx.nd.array([[3.0, 4.0]])
    backward(net, inputs, opt)
    ampx.unscale(opt)
    assert net.weight.grad().dtype == np.float32
    assert net.weight.grad().asnumpy().tolist() == [[3.0, 4.0]]
    assert float(ampx.clip_grad_norm(opt, 0.3).asnumpy()) == 5.0
    opt.step(1)
    expected = 1 - np.array([[3, 4]], "float32") * np.float32(0.3 / 5)
    np.testing.assert_allclose(net.weight.ampx_masters[0].asnumpy(), expected, rtol=2.0**-22)
    assert name_of(net.weight.grad().dtype) == "bfloat16"
    backward(net, inputs, opt)
    opt.step(1)
    np.testing.assert_allclose(net.weight.ampx_masters[0].asnumpy(), expected - [[3, 4]], rtol=2.0**-20)


@bfloat16
def test_gradients_that_add_are_summed_up():
    amp = init()
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    net.collect_params().setattr("grad_req", "add")
    net, raw = amp.prepare(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}))
    opt = amp.wrap_optimizer(raw)
    for _ in range(2):
        backward(net, mx.nd.array([[1.0, 2.0]]), opt)
    opt.step(1)
    assert net.weight.ampx_masters[0].asnumpy().tolist() == [[-1.0, -3.0]]


@bfloat16
def test_several_contexts_keep_the_same_masters():
    amp = init()
    net = nn.Dense(1, in_units=2, use_bias=False)
    contexts = [mx.cpu(0), mx.cpu(1)]
    net.initialize(mx.init.One(), ctx=contexts)
    raw = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-10})
    net, raw = amp.prepare(net, raw)
    opt = amp.wrap_optimizer(raw)
    for _ in range(2):
        with autograd.record():
            losses = [
                net(mx.nd.ones((1, 2), ctx=context) * (place + 1)).sum() for place, context in enumerate(contexts)
            ]
            with ampx.scale_loss(losses, opt) as scaled:
                autograd.backward(scaled)
        opt.step(1)
    expected = [[1 - 2 * 3 * 2.0**-10] * 2]
    assert [master.asnumpy().tolist() for master in net.weight.ampx_masters] == [expected] * 2


@bfloat16
@pytest.mark.parametrize(("level", "lost"), [("O2", 0.0), ("O3", 1.0)])
def test_the_meter_of_lost_updates_reads_nothing_where_there_are_masters(level, lost):
    amp = init(level)
    net = nn.Dense(4, in_units=4, use_bias=False)
    net.initialize(mx.init.One())
    net, raw = amp.prepare(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-12}))
    opt = amp.wrap_optimizer(raw)
    for _ in range(100):
        backward(net, mx.nd.ones((1, 4)), opt)
        opt.step(1)
    assert opt.meter.lost == lost


# -- checkpoints -----------------------------------------------------------------------------------


@bfloat16
@pytest.mark.parametrize("hybridize", [False, True])
def test_a_checkpoint_loads_in_plain_float32_mxnet_and_goes_on(hybridize, tmp_path):
    _, net, opt = trained(hybridize=hybridize)
    state = saved(net, tmp_path)
    opt.save_states(str(tmp_path / "trainer"))
    expected = momenta(opt)
    ampx.shutdown()
    plain = network()
    plain.load_parameters(str(tmp_path / "saved"))
    assert_same(own(plain), state)
    trainer = trainer_of(plain)
    trainer.load_states(str(tmp_path / "trainer"))
    assert_same(momenta(trainer), expected)
    with autograd.record():
        loss = plain(batch(0)).square().mean()
    loss.backward()
    trainer.step(1)


@bfloat16
def test_a_plain_checkpoint_loads_in_a_prepared_network(tmp_path):
    plain = network()
    trainer = trainer_of(plain)
    with autograd.record():
        loss = plain(batch(0)).square().mean()
    loss.backward()
    trainer.step(1)
    expected = saved(plain, tmp_path)
    trainer.save_states(str(tmp_path / "trainer"))
    _, net, opt = trained()
    net.load_parameters(str(tmp_path / "saved"))
    opt.load_states(str(tmp_path / "trainer"))
    assert_same(momenta(opt), momenta(trainer))
    assert_same(saved(net, tmp_path), expected)
    train(net, opt, 1)


@bfloat16
def test_the_file_holds_what_rounding_loses(tmp_path):
    _, net, _ = trained()
    values = saved(net, tmp_path)["0.weight"]
    assert not np.array_equal(values, rounded(values))
    assert np.array_equal(rounded(values), own(net)["0.weight"])


@bfloat16
def test_a_part_of_a_network_saves_exactly_too(tmp_path):
    _, net, _ = trained()
    whole = saved(net, tmp_path)
    assert np.array_equal(saved(net[0], tmp_path)["weight"], whole["0.weight"])


@bfloat16
@pytest.mark.parametrize("order", ["parameters first", "states first"])
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_resuming_continues_bit_identically(level, hybridize, order, tmp_path):
    amp, net, opt = trained(level=level, hybridize=hybridize)
    net.save_parameters(str(tmp_path / "net"))
    opt.save_states(str(tmp_path / "trainer"))
    train(net, opt, 4, start=10)
    amp = init(level)
    other = network(hybridize=hybridize)
    other, raw = amp.prepare(other, trainer_of(other))
    other_opt = amp.wrap_optimizer(raw)
    loads = [
        lambda: other.load_parameters(str(tmp_path / "net")),
        lambda: other_opt.load_states(str(tmp_path / "trainer")),
    ]
    for load in loads if order == "parameters first" else reversed(loads):
        load()
    train(other, other_opt, 4, start=10)
    assert_same(own(other), own(net))
    assert_same(saved(other, tmp_path), saved(net, tmp_path))
    assert_same(momenta(other_opt), momenta(opt))


@bfloat16
def test_parameters_load_before_the_first_forward_of_a_network_without_shapes(tmp_path):
    _, net, _ = trained()
    expected = saved(net, tmp_path)
    amp = init()
    other = network(shapes=False)
    other, raw = amp.prepare(other, trainer_of(other))
    other.load_parameters(str(tmp_path / "saved"))
    assert_same(saved(other, tmp_path), expected)
    train(other, amp.wrap_optimizer(raw), 1)


@bfloat16
@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_a_trainer_is_copied_with_its_parameters(copier):
    amp = init()
    weight = nn.Dense(2, in_units=2, use_bias=False)
    weight.initialize(mx.init.One())
    amp_net, raw = amp.prepare(weight, gluon.Trainer(weight.collect_params(), "sgd", {"learning_rate": 2.0**-12}))
    opt = amp.wrap_optimizer(raw)
    twin = copy.deepcopy(opt) if copier == "deepcopy" else pickle.loads(pickle.dumps(opt))
    (own_parameter,), (other,) = low_parameters(opt._params), low_parameters(twin._params)
    assert other is not own_parameter
    assert other.ampx_masters[0].asnumpy().tolist() == own_parameter.ampx_masters[0].asnumpy().tolist()
    assert amp_net(mx.nd.ones((1, 2))).asnumpy().tolist() == [[2.0, 2.0]]


# -- float16, of which a CPU computes no products -----------------------------------------------------


class Scale(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(2,), init=mx.init.One())

    def hybrid_forward(self, space, x, weight):
        return space.broadcast_mul(space.cast(x, "float16"), weight)


@pytest.mark.parametrize("unscale", ["later", "by hand", "clip"])
def test_gradients_of_float16_that_are_smaller_than_it_reaches_are_applied(unscale):
    """2**-26 is no float16, and 2**-14 times 2**-12 is what the scaled gradients stand for."""
    amp = ampx.init("mxnet", level="O0", loss_scale=2.0**12)
    net = Scale()
    net.initialize()
    raw = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**6})
    net, raw = prepare(net, raw, CastPlan("cpu", "float16", "O2"))
    opt = amp.wrap_optimizer(raw, **({"max_grad_norm": 1.0} if unscale == "clip" else {}))
    assert name_of(net.weight.data().dtype) == "float16"
    backward(net, mx.nd.full((1, 2), 2.0**-6), opt, lambda output: (output * 2.0**-20).sum())
    if unscale == "by hand":
        ampx.unscale(opt)
        assert net.weight.grad().asnumpy().tolist() == [2.0**-26] * 2
    opt.step(1)
    assert net.weight.ampx_masters[0].asnumpy().tolist() == [1 - 2.0**-20] * 2


# -- calls -----------------------------------------------------------------------------------------


@bfloat16
def test_preparing_again_with_another_trainer_is_refused():
    amp = init()
    net = network()
    amp.prepare(net, trainer_of(net))
    with pytest.raises(ampx.ProtocolError, match="lists"):
        amp.prepare(net, trainer_of(net))


@bfloat16
def test_low_precision_parameters_without_masters_are_refused_at_o2():
    amp = init()
    net = nn.Dense(1, in_units=2)
    net.initialize()
    amp.prepare(net)
    with pytest.raises(ampx.LowPrecisionParametersError, match="prepare"):
        amp.wrap_optimizer(trainer_of(net))


@bfloat16
def test_something_that_is_no_trainer_is_refused():
    amp = init()
    for wrong in (3, "net"):
        with pytest.raises(ampx.InvalidOptionError, match=type(wrong).__name__):
            amp.backend.prepare(network(), wrong, amp.plan)


@bfloat16
def test_sparse_gradients_of_low_precision_parameters_are_refused():
    amp = init()
    net = nn.Embedding(4, 2, sparse_grad=True)
    net.initialize()
    with pytest.raises(ampx.UnsupportedByBackendError, match="sparse"):
        amp.prepare(net, trainer_of(net))
    assert name_of(net.weight.data().dtype) == "float32"


@bfloat16
def test_numpy_semantics_are_refused():
    """MXNet's casting does not reach them: such a network would fail in its first product."""
    amp = init()
    net = nn.Dense(1, in_units=2)
    net.initialize()
    with mx.util.np_array(True), pytest.raises(ampx.UnsupportedByBackendError, match="set_np"):
        amp.prepare(net)


@bfloat16
def test_shutdown_leaves_mxnet_as_it_was_and_the_network_computing():
    before = mx.nd.FullyConnected
    amp, net, _ = trained()
    expected = net(batch(0)).asnumpy()
    assert mx.nd.FullyConnected is not before  # what the network needs stays between calls: it is slow to make
    amp.shutdown()
    assert mx.nd.FullyConnected is before
    assert np.array_equal(net(batch(0)).asnumpy(), expected)
    assert mx.nd.FullyConnected is before


@pytest.mark.gpu
def test_o2_trains_on_a_gpu():
    if not mx.context.num_gpus():
        pytest.skip("no CUDA device for mxnet")
    amp = ampx.init("mxnet", dtype="float16", device="gpu", level="O2")
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=4), nn.BatchNorm(in_channels=8), nn.Dense(4, in_units=8))
    net.initialize(mx.init.Xavier(), ctx=mx.gpu())
    net.hybridize()
    net, raw = amp.prepare(net, trainer_of(net, "adam", learning_rate=0.05))
    opt = amp.wrap_optimizer(raw)
    x, losses = mx.nd.random.normal(shape=(32, 4), ctx=mx.gpu()), []
    for _ in range(30):
        with autograd.record():
            loss = (net(x) - x).square().mean()
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
        opt.step(1)
        losses.append(loss.asscalar())
    assert name_of(net[0].weight.data(mx.gpu()).dtype) == "float16"
    assert DTYPES["float32"] == net[1].gamma.data(mx.gpu()).dtype
    assert losses[-1] < losses[0] / 2
