"""`ampx_mxnet.amp`: scripts written for MXNet's own amp, unedited."""

import copy
import pathlib
import pickle
import statistics
import sys

import numpy as np
import pytest

import ampx
import ampx_mxnet.amp
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE
from ampx_mxnet import compat
from ampx_mxnet.compat import mx
from processes import last_json

PROGRAMS = pathlib.Path(__file__).parents[1] / "programs" / "mxnet"
RUN = (
    "import runpy, sys, warnings; warnings.simplefilter('ignore'); import ampx_mxnet.amp; ampx_mxnet.amp.install(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture
def installed():
    ampx_mxnet.amp.install()
    yield
    ampx_mxnet.amp.uninstall()


def scaled_backward(compute, trainer):
    """Compute a loss and run its backward as the vendor's recipe does."""
    with mx.autograd.record():
        loss = compute()
        with ampx_mxnet.amp.scale_loss(loss, trainer) as scaled:
            mx.autograd.backward(scaled)


def trained(name, *arguments):
    return last_json("-c", RUN, PROGRAMS / name, *arguments)


# -- the recipe ------------------------------------------------------------------------------------------------


@pytest.mark.bfloat16
@pytest.mark.parametrize("place", ["mxnet.contrib", "mxnet"])
def test_the_vendors_recipe_trains_digits(installed, place):
    """The lines of the recipe as they are printed; 450 test images tell 10 digits apart."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    images, labels = mx.nd.array(digits.images[:, None] / 16.0), mx.nd.array(digits.target)
    names = {"mx": mx, "images": images[:1347], "labels": labels[:1347]}
    exec(
        f"from {place} import amp\n"
        + """
from mxnet import autograd, gluon
from mxnet.gluon import nn

amp.init()

net = nn.HybridSequential()
net.add(nn.Conv2D(16, 3, activation="relu"), nn.Flatten(), nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})

amp.init_trainer(trainer)

for epoch in range(10):
    for start in range(0, 1344, 64):
        data, label = images[start : start + 64], labels[start : start + 64]
        with autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(64)
""",
        names,
    )
    trainer = names["trainer"]
    assert trainer.last_step.applied
    assert trainer.loss_scale == 2.0**16
    assert trainer.optimizer.num_update == 10 * 21
    assert names["net"](images[:2]).dtype == compat.amp.amp.bfloat16
    right = (names["net"](images[1347:]).astype("float32").argmax(1) == labels[1347:]).mean().asscalar()
    assert right > 0.9


@pytest.mark.bfloat16
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("image_classification.py", ("--dtype", "amp")),
        pytest.param("gan.py", ("--amp",), marks=pytest.mark.nightly),
        pytest.param("word_language_model.py", ("--amp",), marks=pytest.mark.nightly),
    ],
)
def test_an_unedited_program_trains_as_in_float32(name, arguments):
    """Where the two runs have to agree, by how bfloat16 rounds and how the losses scatter.

    bfloat16 keeps 8 bits, so one rounding moves a number by at most 2^-9 of it; a forward pass of a handful of cast
    layers moves the first loss, which no update has touched yet, by at most a few of these: 2^-6. Later the runs are
    two samples of the same noisy training: their mean loss over the second half differs by less than the standard
    deviation that single losses have there in float32.
    """
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    plain, scaled = trained(name), trained(name, *arguments)
    assert len(plain["losses"]) == len(scaled["losses"]) >= 80
    assert scaled["losses"] != plain["losses"]
    assert scaled["losses"][0] == pytest.approx(plain["losses"][0], rel=2**-6)
    late = len(plain["losses"]) // 2
    spread = statistics.stdev(plain["losses"][late:])
    assert abs(statistics.mean(scaled["losses"][late:]) - statistics.mean(plain["losses"][late:])) < spread
    if name == "image_classification.py":
        # 450 images: the standard error of a share of 0.96 is 0.0092, that of a difference of two 0.013; twice that.
        assert plain["metric"] > 0.93
        assert abs(scaled["metric"] - plain["metric"]) < 0.026


# -- the trainer stays the script's ------------------------------------------------------------------------------


def test_the_scripts_own_trainer_scales_and_skips(dense):
    """Scale, count of updates and weights follow the reference pattern, on the object that the script made."""
    net = dense()
    trainer = mine = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125, "momentum": 0.5})
    ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(growth_interval=3), nan_loss="skip")
    ampx_mxnet.amp.init_trainer(trainer)
    assert trainer is mine
    assert isinstance(trainer, mx.gluon.Trainer)
    seen, weights = [], []
    for overflow in REFERENCE_PATTERN:
        inputs = mx.nd.array([[np.inf if overflow else 1.0, 1.0]])
        scaled_backward(lambda inputs=inputs: net(inputs), trainer)
        trainer.step(1)
        seen.append(trainer.loss_scale)
        weights.append(net.weight.data().asnumpy().tolist())
    assert seen == list(REFERENCE_TRACE)
    applied = [not overflow for overflow in REFERENCE_PATTERN]
    assert trainer.optimizer.num_update == sum(applied)
    assert [now != before for before, now in zip([[[1.0, 1.0]], *weights], weights, strict=False)] == applied


class OwnTrainer(mx.gluon.Trainer):
    """A trainer of a script's own making."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def step(self, batch_size, ignore_stale_grad=False):
        self.steps += 1
        super().step(batch_size, ignore_stale_grad)


@pytest.mark.bfloat16
def test_a_trainer_of_the_scripts_own_class_keeps_its_methods_and_attributes(dense):
    ampx_mxnet.amp.init()
    net = dense()
    trainer = OwnTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    trainer.note = "mine"
    ampx_mxnet.amp.init_trainer(trainer)
    scaled_backward(lambda: net(mx.nd.ones((1, 2))).astype("float32"), trainer)
    trainer.step(1)
    trainer.set_learning_rate(0.25)
    assert (trainer.steps, trainer.note, trainer.learning_rate) == (1, "mine", 0.25)
    assert net.weight.data().asnumpy().tolist() == [[0.5, 0.5]]
    again = pickle.loads(pickle.dumps(trainer._optimizer))
    assert again.learning_rate == 0.25


@pytest.mark.bfloat16
def test_a_refused_trainer_stays_as_it_was(dense):
    ampx_mxnet.amp.init()
    trainer = mx.gluon.Trainer(dense().collect_params(), "sgd", update_on_kvstore=True)
    with pytest.raises(ampx.UnsupportedByBackendError, match="update_on_kvstore=True"):
        ampx_mxnet.amp.init_trainer(trainer)
    assert type(trainer) is mx.gluon.Trainer


def test_a_trainer_of_a_list_that_is_refused_is_given_back(dense):
    """`in_place` is an option of wrap_optimizer: a list is wrapped as a whole or not at all."""
    session = ampx.init("mxnet", level="O0", loss_scale="dynamic")
    good = OwnTrainer(dense().collect_params(), "sgd")
    bad = mx.gluon.Trainer(dense().collect_params(), "sgd", update_on_kvstore=True)
    with pytest.raises(ampx.UnsupportedByBackendError):
        session.wrap_optimizer([good, bad], in_place=True)
    assert type(good) is OwnTrainer
    assert good.steps == 0
    assert good._kvstore_params["update_on_kvstore"] is None
    assert session.wrap_optimizer(good, in_place=True) is good


@pytest.mark.bfloat16
def test_gradients_clipped_after_unscale_are_true(dense):
    """With allreduce_grads, unscale, clip and update, in the order that MXNet's documentation gives."""
    ampx_mxnet.amp.init()
    net = dense()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    ampx_mxnet.amp.init_trainer(trainer)
    scaled_backward(lambda: net(mx.nd.array([[3.0, 4.0]])).astype("float32"), trainer)
    trainer.allreduce_grads()
    ampx_mxnet.amp.unscale(trainer)
    ampx_mxnet.amp.unscale(trainer)
    norm = mx.gluon.utils.clip_global_norm([net.weight.grad()], 1.0)
    trainer.update(1)
    assert norm == 5.0
    assert net.weight.data().asnumpy().ravel().tolist() == pytest.approx([1 - 0.6, 1 - 0.8], abs=1e-6)


@pytest.mark.bfloat16
def test_numbers_of_the_trainers_scaler_are_those_of_the_loss_scale(dense):
    """What scripts read to clip scaled gradients by a scaled bound, save and load, and set."""
    ampx_mxnet.amp.init()
    trainer = mx.gluon.Trainer(dense().collect_params(), "sgd", {"learning_rate": 1.0})
    ampx_mxnet.amp.init_trainer(trainer)
    scaler = trainer._amp_loss_scaler
    native = compat.amp.loss_scaler.LossScaler()
    for name in ("loss_scale", "_loss_scale", "_next_loss_scale", "_max_loss_scale", "_scale_seq_len", "_unskipped"):
        assert getattr(scaler, name) == getattr(native, name), name
    scaler._scale_seq_len = 2
    scaler._max_loss_scale = 2.0**17
    scaler._loss_scale, scaler._next_loss_scale, scaler._unskipped = pickle.loads(pickle.dumps([2.0**15, 2.0**16, 1]))
    weight = trainer._params[0]
    scales = []
    for slope in (1.0, 1.0, 1.0, 1.0, np.inf):
        scaled_backward(lambda slope=slope: (weight.data() * slope).sum(), trainer)
        if np.isfinite(slope):
            mx.gluon.utils.clip_global_norm(weight.list_grad(), 0.5 * trainer._amp_loss_scaler.loss_scale)
        before = weight.data().asnumpy()
        trainer.step(1)
        if np.isfinite(slope):
            assert np.linalg.norm(weight.data().asnumpy() - before) == pytest.approx(0.5, rel=1e-5)
        scales.append(scaler.loss_scale)
    assert scales == [2.0**17, 2.0**17, 2.0**17, 2.0**17, 2.0**16]


@pytest.mark.bfloat16
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_saved_scaler_holds_the_numbers_and_is_resumed_from(dense, duplicate):
    """MXNet's scaler has no state dict: scripts save the object, and put it on the trainer that goes on."""

    def start():
        trainer = mx.gluon.Trainer(dense().collect_params(), "sgd", {"learning_rate": 1.0})
        ampx_mxnet.amp.init_trainer(trainer)
        return trainer

    ampx_mxnet.amp.init()
    trainer = start()
    trainer._amp_loss_scaler._scale_seq_len = 3
    for slope in (np.inf, 1.0, 1.0):
        scaled_backward(lambda slope=slope: (trainer._params[0].data() * slope).sum(), trainer)
        trainer.step(1)
    saved = duplicate(trainer._amp_loss_scaler)
    assert isinstance(saved, compat.amp.loss_scaler.LossScaler)
    other = start()
    other._amp_loss_scaler = saved
    with mx.autograd.record(), ampx_mxnet.amp.scale_loss(other._params[0].data().sum(), other) as scaled:
        mx.autograd.backward(scaled)
    assert scaled.asscalar() == 2.0 * 2.0**15
    other.step(1)
    assert other._amp_loss_scaler.loss_scale == 2.0**16  # the third finite step in a row, counted over both
    assert other._params[0].data().asnumpy().tolist() == [[0.0, 0.0]]


@pytest.mark.bfloat16
def test_gradients_of_a_scaled_loss_divided_by_hand_are_true(dense):
    """A gradient penalty, or the gradient of an input: what a script computes between `scale_loss` and the step."""
    ampx_mxnet.amp.init()
    net = dense()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    ampx_mxnet.amp.init_trainer(trainer)
    x = mx.nd.array([[3.0, 4.0]])
    with mx.autograd.record():
        x.attach_grad()
        loss = (x * net.weight.data()).sum()
        with ampx_mxnet.amp.scale_loss(loss, trainer) as scaled:
            (by_input,) = mx.autograd.grad(scaled, [x], retain_graph=True)
    assert (by_input / trainer._amp_loss_scaler.loss_scale).asnumpy().tolist() == [[1.0, 1.0]]


# -- init ------------------------------------------------------------------------------------------------------


@pytest.mark.bfloat16
def test_a_repeated_init_changes_nothing_and_another_replaces(dense):
    net = dense()
    ampx_mxnet.amp.init()
    first = ampx.current("mxnet")
    ampx_mxnet.amp.init()
    assert ampx.current("mxnet") is first
    assert net(mx.nd.ones((1, 2))).dtype == compat.amp.amp.bfloat16
    ampx_mxnet.amp.init(target_precision_ops=["Convolution"])
    assert ampx.current("mxnet") is not first
    assert net(mx.nd.ones((1, 2))).dtype == np.float32
    ampx_mxnet.amp.init("bfloat16", fp32_ops=["FullyConnected"])
    assert net(mx.nd.ones((1, 2))).dtype == np.float32
    assert mx.nd.softmax(net(mx.nd.ones((1, 2)))).dtype == np.float32


@pytest.mark.bfloat16
def test_conditional_operators_compute_in_float32_with_the_values_given():
    ampx_mxnet.amp.init(
        target_precision_ops=["FullyConnected"],
        fp32_ops=[],
        conditional_fp32_ops=[("Activation", "act_type", ["relu"])],
    )
    low = mx.nd.amp_cast(mx.nd.ones((2, 2)), dtype=compat.amp.amp.bfloat16)
    assert mx.nd.Activation(low, act_type="relu").dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"target_dtype": "float16"}, ampx.UnsupportedDtypeError, "'float16' is not supported by backend 'mxnet'"),
        ({"target_dtype": "int8"}, ampx.UnsupportedDtypeError, "is not a dtype of mixed precision"),
        pytest.param(
            {"fp32_ops": ["no_such_operator"]},
            ampx.UnsupportedOpError,
            "no_such_operator",
            marks=pytest.mark.bfloat16,
        ),
        ({"fp32_ops": "softmax"}, ampx.InvalidOptionError, "Pass \\['softmax'\\]"),
        pytest.param(
            {"fp32_ops": ["FullyConnected"], "target_precision_ops": ["FullyConnected"]},
            ampx.UnsupportedOpError,
            "both name FullyConnected",
            marks=pytest.mark.bfloat16,
        ),
        ({"layout_optimization": True}, ampx.UnsupportedByBackendError, "layout_optimization"),
    ],
)
def test_init_refuses_and_stays_off(arguments, error, match):
    if arguments.get("target_dtype") == "float16" and mx.context.num_gpus():
        pytest.skip("float16 is computed on this GPU")
    with pytest.raises(error, match=match):
        ampx_mxnet.amp.init(**arguments)
    with pytest.raises(ampx.NotInitializedError, match=r"Call amp.init\(\) first"):
        ampx_mxnet.amp.init_trainer(None)


@pytest.mark.bfloat16
def test_what_is_no_trainer_or_was_not_given_is_refused(dense):
    ampx_mxnet.amp.init()
    with pytest.raises(ampx.NotAnOptimizerError, match=r"gluon\.Trainer"):
        ampx_mxnet.amp.init_trainer(mx.optimizer.SGD())
    trainer = mx.gluon.Trainer(dense().collect_params(), "sgd")
    for call in (lambda: ampx_mxnet.amp.scale_loss(mx.nd.ones(1), trainer), lambda: ampx_mxnet.amp.unscale(trainer)):
        with pytest.raises(ampx.NotWrappedError, match=r"Call amp\.init_trainer"):
            call()
    ampx_mxnet.amp.init_trainer(trainer)
    with pytest.raises(ampx.AlreadyWrappedError):
        ampx_mxnet.amp.init_trainer(trainer)


# -- conversion and lists ----------------------------------------------------------------------------------------


@pytest.mark.bfloat16
def test_conversions_by_mxnets_names_compute_in_bfloat16():
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="layer")
    parameters = {"layer_weight": mx.nd.ones((2, 4)), "layer_bias": mx.nd.zeros(2)}
    converted, arguments, _ = ampx_mxnet.amp.convert_model(symbol, parameters, {}, "bfloat16")
    assert "amp_cast" in converted.tojson()
    assert sorted(arguments) == ["layer_bias", "layer_weight"]
    assert "amp_cast" in ampx_mxnet.amp.convert_symbol(symbol, "bfloat16").tojson()
    assert "amp_cast" not in symbol.tojson()
    untouched = ampx_mxnet.amp.convert_symbol(symbol, "bfloat16", excluded_sym_names=["layer"])
    assert "bfloat16" not in untouched.tojson()
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(2, in_units=4))
    net.initialize(mx.init.One())
    net.hybridize()
    net(mx.nd.ones((1, 4)))
    block = ampx_mxnet.amp.convert_hybrid_block(net, "bfloat16", ctx=mx.cpu(1))
    assert block(mx.nd.ones((1, 4), ctx=mx.cpu(1))).astype("float32").asnumpy().tolist() == [[4.0, 4.0]]
    with pytest.raises(ampx.UnsupportedByBackendError, match="sym_gen"):
        ampx_mxnet.amp.convert_bucketing_module(None)


def test_lists_are_mxnets():
    ours, native = ampx_mxnet.amp, compat.amp
    assert ours.list_fp16_ops() == ours.list_lp16_ops("float16") == native.list_lp16_ops("float16")
    bfloat16 = native.amp.bfloat16
    for name in [name for name in ours.__all__ if name.startswith("list_") and "fp16_" not in name]:
        assert getattr(ours, name)("bfloat16") == getattr(native, name)(bfloat16)
    assert ours.list_fp16_fp32_ops() == native.list_lp16_fp32_ops("float16")


# -- install -----------------------------------------------------------------------------------------------------


def test_install_replaces_both_names_and_uninstall_leaves_no_trace():
    import mxnet.contrib

    native = sys.modules["mxnet.contrib.amp"]
    ampx_mxnet.amp.install()
    ampx_mxnet.amp.install()
    try:
        import mxnet.amp
        from mxnet.contrib.amp import init_trainer

        assert mxnet.amp is mxnet.contrib.amp is ampx_mxnet.amp
        assert init_trainer is ampx_mxnet.amp.init_trainer
    finally:
        ampx_mxnet.amp.uninstall()
    assert sys.modules["mxnet.contrib.amp"] is mxnet.contrib.amp is native
    assert sys.modules["mxnet.contrib.amp.amp"] is native.amp
    assert [name for name in sys.modules if name.startswith("mxnet.amp")] == []
    assert not hasattr(mx, "amp")
    ampx_mxnet.amp.uninstall()


@pytest.mark.bfloat16
@pytest.mark.parametrize("place", ["mxnet.contrib", "mxnet"])
def test_modules_and_lists_of_mxnets_amp_are_there_under_both_names(installed, place):
    """As scripts with lists of their own, and GluonNLP's masked softmax, import and read them."""
    names = {}
    exec(
        f"""
from {place}.amp import amp, lists
from {place} import amp as package
import {place}.amp.lists.symbol_fp16 as symbol_fp16
from {place}.amp.lists import symbol_bf16
from {place}.amp.amp import init_trainer, LossScaler
from {place}.amp.loss_scaler import LossScaler as SameLossScaler
""",
        names,
    )
    assert names["amp"] is names["package"] is ampx_mxnet.amp
    assert names["lists"] is names["amp"].lists is compat.amp.lists
    assert names["symbol_fp16"] is names["package"].lists.symbol_fp16
    assert compat.amp.list_fp32_ops("float16") == names["symbol_fp16"].FP32_FUNCS
    assert names["symbol_bf16"] is compat.amp.lists.symbol_bf16
    assert names["init_trainer"] is ampx_mxnet.amp.init_trainer
    assert names["LossScaler"] is names["SameLossScaler"] is compat.amp.loss_scaler.LossScaler
    assert not names["amp"].amp._amp_initialized
    names["amp"].init()
    assert names["amp"].amp._amp_initialized
    with pytest.raises(AttributeError, match="no_such_name"):
        names["amp"].no_such_name  # noqa: B018


def test_every_public_name_of_mxnets_amp_is_there():
    native = {name for name in vars(compat.amp) if name.startswith(("init", "scale", "unscale", "convert", "list_"))}
    assert native <= set(ampx_mxnet.amp.__all__)
