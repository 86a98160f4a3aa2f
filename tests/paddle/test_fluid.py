"""`ampx_paddle.fluid`: scripts written for `paddle.fluid` and its mixed precision, unedited."""

import importlib
import importlib.util
import itertools
import math
import pathlib
import statistics
import sys

import numpy as np
import paddle
import pytest

import ampx
import ampx_paddle.fluid
from ampx_paddle.fluid.layers.learning_rate import Schedule
from processes import last_json

PROGRAMS = pathlib.Path(__file__).parents[1] / "programs" / "fluid"
RUN = (
    "import runpy, sys, warnings; warnings.simplefilter('ignore'); import ampx_paddle.fluid; "
    "ampx_paddle.fluid.install(); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
# Paddle says so of its own optimizers while they build a program.
pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")


def run(fluid, fetch, feed=None):
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    return executor.run(fluid.default_main_program(), feed=feed or {}, fetch_list=fetch)


def casts(fluid):
    operations = fluid.default_main_program().global_block().ops
    return sum(
        operation.name() == "pd_op.cast" and operation.result(0).dtype == paddle.bfloat16 for operation in operations
    )


def trained(name, *arguments):
    return last_json("-c", RUN, PROGRAMS / name, *arguments)


# -- the recipe ------------------------------------------------------------------------------------------------


def test_the_vendors_recipe_trains_digits(fluid, static_dtype):
    """The lines of the recipe as they are printed, in a linear classifier; its learning rate is the default 0.001."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    names = {}
    exec(
        """
import paddle.fluid as fluid
from paddle.fluid.optimizer import SGDOptimizer

pixels = fluid.layers.data(name="pixels", shape=[64], dtype="float32")
label = fluid.layers.data(name="label", shape=[1], dtype="int64")
predict = fluid.layers.fc(input=pixels, size=10, act="softmax")
loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predict, label=label))

sgd = SGDOptimizer()
mp_sgd = fluid.contrib.mixed_precision.decorator.decorate(sgd)
mp_sgd.minimize(loss)

exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
""",
        names,
    )
    feed = {"pixels": digits.data.astype("float32"), "label": digits.target[:, None]}
    losses = [float(names["exe"].run(feed=feed, fetch_list=[names["loss"]])[0]) for _ in range(60)]
    assert all(later < earlier for earlier, later in zip(losses[::10], losses[10::10], strict=False))
    assert losses[-1] < losses[0] / 2
    assert names["mp_sgd"].last_step.applied
    assert names["mp_sgd"].loss_scale == 2.0**15
    assert (casts(fluid) > 0) is (static_dtype == "bfloat16")


@pytest.mark.parametrize(
    ("name", "length", "switch"),
    [
        ("image_classification.py", (), "--fp16"),  # as long as it takes to be accurate
        ("gan.py", ("--epoch", "4"), "--use_amp"),
        ("word2vec.py", ("--steps", "120"), "--use_amp"),
    ],
    ids=["image_classification", "gan", "word2vec"],
)
def test_an_unedited_program_trains_as_in_float32(name, length, switch, static_dtype):
    """Where the two runs have to agree, by how bfloat16 rounds and how the losses scatter.

    bfloat16 keeps 8 bits, so one rounding moves a number by at most 2^-9 of it; a forward pass of a handful of cast
    layers moves the first loss, which no update has touched yet, by at most a few of these: 2^-6. Later the runs are
    two samples of the same noisy training: their mean loss over the second half differs by less than the standard
    deviation that single losses have there in float32.
    """
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    plain, scaled = trained(name, *length), trained(name, *length, switch)
    assert len(plain["losses"]) == len(scaled["losses"]) >= 100
    assert static_dtype == "float32" or scaled["losses"] != plain["losses"]
    assert scaled["losses"][0] == pytest.approx(plain["losses"][0], rel=2**-6)
    late = len(plain["losses"]) // 2
    spread = statistics.stdev(plain["losses"][late:])
    assert abs(statistics.mean(scaled["losses"][late:]) - statistics.mean(plain["losses"][late:])) < spread
    if name == "image_classification.py":
        # 453 images: the standard error of a share of 0.95 is 0.010, that of a difference of two 0.0145; twice that.
        assert plain["metric"] > 0.92
        assert abs(scaled["metric"] - plain["metric"]) < 0.029


# -- decorate ----------------------------------------------------------------------------------------------------


def linear(fluid, **options):
    """Minimise mean(x @ w) with SGD and a learning rate of 1: the gradient of w is the mean of x."""
    x = fluid.layers.data("x", [2])
    weight = fluid.ParamAttr(name=fluid.unique_name.generate("w"), initializer=fluid.initializer.Constant(1.0))
    loss = fluid.layers.mean(fluid.layers.fc(x, 1, param_attr=weight, bias_attr=False))
    optimizer = fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(1.0), **options)
    optimizer.minimize(loss)
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())

    def step(value):
        fetch = [weight.name, optimizer.get_loss_scaling(), optimizer.get_scaled_loss()]
        results = executor.run(feed={"x": np.full([4, 2], value, "float32")}, fetch_list=fetch)
        return results[0].ravel().tolist(), float(results[1]), float(results[2])

    return optimizer, step


def test_the_loss_scale_moves_as_fluid_said_and_skipped_steps_change_nothing(fluid):
    """Falls at the second overflow in a row by 0.75, and grows after two finite steps in a row by 2."""
    optimizer, step = linear(
        fluid,
        init_loss_scaling=1024.0,
        incr_every_n_steps=2,
        decr_every_n_nan_or_inf=2,
        incr_ratio=2.0,
        decr_ratio=0.75,
    )
    inf, trace, weights = float("inf"), [], [[1.0, 1.0]]
    for value in (0.25, inf, 0.25, inf, inf, 0.25, 0.25, inf):
        weight, scale, _ = step(value)
        trace.append(scale)
        weights.append(weight)
        assert optimizer.last_step.applied is (value != inf)
    assert trace == [1024, 1024, 1024, 1024, 768, 768, 1536, 1536]
    assert [weight[0] for weight in weights] == [1, 0.75, 0.75, 0.5, 0.5, 0.5, 0.25, 0, 0]


def test_a_static_loss_scale_stays_and_skips_all_the_same(fluid):
    _, step = linear(fluid, init_loss_scaling=8.0, use_dynamic_loss_scaling=False)
    assert step(0.25) == ([0.75, 0.75], 8.0, 0.5 * 8)
    assert step(float("inf"))[:2] == ([0.75, 0.75], 8.0)
    assert step(0.25)[0] == [0.5, 0.5]


@pytest.mark.bfloat16
def test_products_are_rounded_to_bfloat16_and_nothing_else_is(fluid):
    """By NumPy: inputs and the product lose all but 8 bits; what follows is float32."""
    x = fluid.layers.data("x", [1])
    weight = fluid.ParamAttr(initializer=fluid.initializer.Constant(1 + 2**-6))
    product = fluid.layers.fc(x, 1, param_attr=weight, bias_attr=False)
    loss = fluid.layers.mean(product + 2**-20)
    decorated = fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(0.0), init_loss_scaling=1.0)
    decorated.minimize(loss)
    value = np.float32(1 + 2**-12)  # rounds to 1 in bfloat16
    results = run(fluid, [product, loss], {"x": [[value]]})
    assert float(results[0]) == 1 + 2**-6
    assert float(results[1]) == np.float32(1 + 2**-6 + 2**-20)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, 2),
        ({"custom_black_list": {"conv2d"}}, 1),
        ({"custom_black_list": {"matmul_v2", "conv2d"}}, 0),
        ({"custom_black_varnames": {"kept"}}, 1),
        ({"custom_white_list": {"elementwise_add"}}, 4),
    ],
)
@pytest.mark.bfloat16
def test_lists_decide_what_is_cast(fluid, lists, expected):
    """A convolution and a matrix product, each with a bias added."""
    image = fluid.layers.data("image", [1, 4, 4])
    conv = fluid.layers.conv2d(image, 2, 3, param_attr="kept")
    loss = fluid.layers.mean(fluid.layers.fc(conv, 1))
    chosen = fluid.contrib.mixed_precision.AutoMixedPrecisionLists(**lists)
    fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(0.1), chosen).minimize(loss)
    low = [
        operation
        for operation in fluid.default_main_program().global_block().ops
        if operation.name() in ("pd_op.conv2d", "pd_op.matmul", "pd_op.add")
        and operation.result(0).dtype == paddle.bfloat16
    ]
    assert len(low) == expected


def test_gradients_and_updates_are_float32_and_equal_those_of_float32_up_to_rounding(fluid):
    """One step of a linear layer by NumPy: w - lr * x.T @ dy, with one rounding of x and of dy, 2^-8 each."""
    rng = np.random.default_rng(0)
    images, start = rng.normal(size=[8, 5]).astype("float32"), rng.normal(size=[5, 3]).astype("float32")
    x = fluid.layers.data("x", [5])
    weight = fluid.ParamAttr(name="checked_w", initializer=fluid.initializer.NumpyArrayInitializer(start))
    loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(x, 3, param_attr=weight, bias_attr=False)))
    _, pairs = fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(0.5)).minimize(loss)
    assert [(parameter.dtype, gradient.dtype) for parameter, gradient in pairs] == [(paddle.float32, paddle.float32)]
    run(fluid, [loss], {"x": images})
    after = np.array(fluid.global_scope().find_var("checked_w").get_tensor())
    gradient = images.T @ (2 * (images @ start) / 24)
    bound = 0.5 * 4 * 2**-8 * (np.abs(images).T @ (2 * (np.abs(images) @ np.abs(start)) / 24))
    assert (np.abs(after - (start - 0.5 * gradient)) <= bound).all()


def test_a_scheduler_of_paddle_moves_the_learning_rate_of_a_wrapped_static_optimizer():
    """The executor sets the variable of the learning rate: it must be the program's, and not of the condition in it."""
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    ampx.init("paddle", level="O0", loss_scale="dynamic")
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [1, 1], "float32")
        weight = paddle.static.create_parameter(
            [1, 1], "float32", default_initializer=paddle.nn.initializer.Constant(8)
        )
        loss = paddle.matmul(x, weight).mean()
        scheduler = paddle.optimizer.lr.StepDecay(1.0, step_size=1, gamma=0.5)
        ampx.wrap_optimizer(paddle.optimizer.SGD(scheduler)).minimize(loss)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    seen = []
    for _ in range(3):
        seen.append(float(executor.run(main, feed={"x": np.ones([1, 1], "float32")}, fetch_list=[weight])[0].item()))
        scheduler.step()
    assert seen == [7.0, 6.5, 6.25]


# -- refusals ----------------------------------------------------------------------------------------------------


def test_float16_on_a_cpu_is_refused_with_what_there_is(fluid, static_dtype):
    if paddle.is_compiled_with_cuda():
        pytest.skip("Paddle computes float16 on a GPU")
    ampx_paddle.fluid.install("float16")
    supported = {"bfloat16": "supported: bfloat16", "float32": "supported: none: only float32"}[static_dtype]
    with pytest.raises(ampx.UnsupportedDtypeError, match=supported):
        fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(0.1))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"use_pure_fp16": True}, ampx.UnsupportedByBackendError, "accepted: float32 parameters"),
        ({"use_fp16_guard": True}, ampx.UnsupportedByBackendError, "whole program"),
        ({"init_loss_scaling": -1.0}, ampx.InvalidOptionError, "-1"),
        ({"decr_ratio": 2.0}, ampx.InvalidOptionError, "backoff_factor"),
    ],
)
def test_what_decorate_cannot_do_is_refused(fluid, options, error, match):
    with pytest.raises(error, match=match):
        fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(0.1), **options)


def test_calls_in_the_wrong_order_are_refused(fluid):
    optimizer = fluid.contrib.mixed_precision.decorate(fluid.optimizer.SGD(0.1))
    with pytest.raises(ampx.ProtocolError, match="Call minimize first"):
        optimizer.get_loss_scaling()
    with pytest.raises(ampx.UnsupportedByBackendError, match="accepted: minimize"):
        optimizer.backward(None)
    with pytest.raises(ampx.UnsupportedOpError, match="no_such_operator"):
        fluid.contrib.mixed_precision.AutoMixedPrecisionLists(custom_white_list={"no_such_operator"})
    paddle.disable_static()
    with pytest.raises(ampx.ProtocolError, match="eager mode"):
        fluid.contrib.mixed_precision.decorate(None)
    paddle.enable_static()


@pytest.mark.parametrize("place", ["", ".layers", ".optimizer", ".contrib.mixed_precision", ".initializer", ".nets"])
def test_a_missing_name_is_refused_with_what_there_is(fluid, place):
    module = importlib.import_module(f"paddle.fluid{place}")
    with pytest.raises(ampx_paddle.fluid.FluidNameError, match=rf"paddle\.fluid{place}\.dynamic_gru is not") as error:
        module.dynamic_gru  # noqa: B018
    assert f"there are: {sorted(module.__all__)[0]}" in str(error.value)
    assert isinstance(error.value, ampx.UnsupportedByBackendError)
    assert not hasattr(module, "dynamic_gru")


def test_names_that_are_near_are_told(fluid):
    with pytest.raises(ampx_paddle.fluid.FluidNameError, match="near: conv2d"):
        fluid.layers.conv3d  # noqa: B018


# Every path and name of the releases before the layers became a table: scripts import them.
PUBLISHED = {
    "": (
        "BuildStrategy clip CompiledProgram contrib core cpu_places CPUPlace create_lod_tensor "
        "create_random_int_lodtensor cuda_pinned_places cuda_places CUDAPinnedPlace CUDAPlace data DataFeeder "
        "default_main_program default_startup_program embedding Executor FluidNameError get_flags global_scope "
        "initializer install io is_compiled_with_cuda layers load LoDTensor name_scope nets optimizer ParamAttr "
        "Program program_guard regularizer require_version save Scope scope_guard set_flags uninstall unique_name"
    ),
    ".clip": "GradientClipByGlobalNorm GradientClipByNorm GradientClipByValue",
    ".contrib": "mixed_precision",
    ".contrib.mixed_precision": "AutoMixedPrecisionLists decorate decorator fp16_lists",
    ".contrib.mixed_precision.decorator": "decorate OptimizerWithMixedPrecision",
    ".contrib.mixed_precision.fp16_lists": "AutoMixedPrecisionLists CustomOpLists",
    ".executor": "DataFeeder Executor LoDTensor",
    ".initializer": (
        "Bilinear BilinearInitializer Constant ConstantInitializer MSRA MSRAInitializer Normal NormalInitializer "
        "NumpyArrayInitializer TruncatedNormal TruncatedNormalInitializer Uniform UniformInitializer Xavier "
        "XavierInitializer"
    ),
    ".io": (
        "batch buffered cache chain compose DataLoader firstn get_parameter_value get_parameter_value_by_name "
        "is_parameter is_persistable load load_inference_model load_params load_persistables load_program_state "
        "load_vars map_readers multiprocess_reader PyReader save save_inference_model save_params save_persistables "
        "save_vars set_program_state shuffle xmap_readers"
    ),
    ".layers": (
        "abs accuracy argmax assign batch_norm cast clip concat conv2d conv2d_transpose cosine_decay create_parameter "
        "cross_entropy data dropout elementwise_add elementwise_div elementwise_max elementwise_min elementwise_mul "
        "elementwise_sub elu embedding exp expand exponential_decay fc fill_constant flatten gather gaussian_random "
        "layer_norm leaky_relu log matmul mean mul noam_decay one_hot ones piecewise_decay polynomial_decay pool2d "
        "pow reduce_max reduce_mean reduce_min reduce_sum relu relu6 reshape scale sigmoid "
        "sigmoid_cross_entropy_with_logits slice softmax softmax_with_cross_entropy softplus split sqrt square "
        "square_error_cost squeeze stack sum tanh topk transpose uniform_random unsqueeze zeros"
    ),
    ".layers.activations": "abs clip elu exp leaky_relu log pow relu relu6 sigmoid softmax softplus sqrt square tanh",
    ".layers.learning_rate": "cosine_decay exponential_decay noam_decay piecewise_decay polynomial_decay",
    ".layers.losses": (
        "accuracy cross_entropy sigmoid_cross_entropy_with_logits softmax_with_cross_entropy square_error_cost"
    ),
    ".layers.networks": "batch_norm conv2d conv2d_transpose dropout embedding fc layer_norm pool2d",
    ".layers.sums": (
        "elementwise_add elementwise_div elementwise_max elementwise_min elementwise_mul elementwise_sub matmul mean "
        "mul reduce_max reduce_mean reduce_min reduce_sum scale sum"
    ),
    ".layers.tensors": (
        "argmax assign cast concat create_parameter data expand fill_constant flatten gather gaussian_random one_hot "
        "ones reshape slice split squeeze stack topk transpose uniform_random unsqueeze zeros"
    ),
    ".nets": "img_conv_group simple_img_conv_pool",
    ".optimizer": (
        "Adagrad AdagradOptimizer Adam Adamax AdamaxOptimizer AdamOptimizer Lamb LambOptimizer Momentum "
        "MomentumOptimizer RMSProp RMSPropOptimizer SGD SGDOptimizer"
    ),
    ".programs": (
        "CompiledProgram default_main_program default_startup_program global_scope name_scope Program program_guard "
        "Scope scope_guard"
    ),
    ".regularizer": "L1Decay L1DecayRegularizer L2Decay L2DecayRegularizer",
}


@pytest.mark.parametrize("path", PUBLISHED)
def test_every_published_path_and_name_is_imported_as_ever(fluid, path):
    module = importlib.import_module(f"ampx_paddle.fluid{path}")
    assert [name for name in PUBLISHED[path].split() if not hasattr(module, name)] == []
    assert importlib.import_module(f"paddle.fluid{path}") is module


def test_what_layers_cannot_do_is_refused(fluid):
    layers = fluid.layers
    x = layers.data("x", [4])
    for call, match in (
        (lambda: layers.data("y", [1], lod_level=1), "LoD"),
        (lambda: layers.fc(x, 2, act="maxout"), "act='maxout'"),
        (lambda: layers.dropout(x, 0.5, seed=3), "random_seed"),
        (lambda: layers.embedding(x, [3, 2], is_distributed=True), "is_distributed"),
        (lambda: layers.conv2d_transpose(layers.data("z", [1, 4, 4]), 2, output_size=8), "filter_size"),
    ):
        with pytest.raises(ampx.AmpxError, match=match):
            call()
    with pytest.raises(ampx.UnsupportedByBackendError, match="Pass the value itself"):
        run(fluid, ["no_such_name"], {"x": np.zeros([1, 4], "float32")})


# -- layers, by NumPy ----------------------------------------------------------------------------------------------


def test_losses_equal_numpy(fluid):
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=[6, 4]).astype("float32"), rng.integers(0, 4, [6, 1])
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    targets = (rng.random([6, 4]) > 0.5).astype("float32")
    ignored = np.where(rng.random([6, 4]) > 0.5, targets, 7.0).astype("float32")
    u = fluid.layers.data("u", [4])
    x, y, t = fluid.layers.data("x", [4]), fluid.layers.data("y", [1], dtype="int64"), fluid.layers.data("t", [4])
    direct, softmax = fluid.layers.softmax_with_cross_entropy(x, y, return_softmax=True)
    other = fluid.layers.cross_entropy(fluid.layers.softmax(x), y)
    fetch = [
        direct,
        softmax,
        other,
        fluid.layers.sigmoid_cross_entropy_with_logits(x, t),
        fluid.layers.accuracy(x, y),
        fluid.layers.square_error_cost(x, t),
        fluid.layers.mean(x),
        fluid.layers.sigmoid_cross_entropy_with_logits(x, u, ignore_index=7),
        fluid.layers.sigmoid_cross_entropy_with_logits(x, u, ignore_index=7, normalize=True),
        fluid.layers.one_hot(y, 4),
    ]
    results = run(fluid, fetch, {"x": logits, "y": labels, "t": targets, "u": ignored})
    expected = -np.log(probabilities[np.arange(6), labels[:, 0]])[:, None]
    sigmoid = np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0) - logits * targets
    right = np.array([(logits.argmax(1) == labels[:, 0]).mean()])
    wanted = [expected, probabilities, expected, sigmoid, right, (logits - targets) ** 2, [logits.mean()]]
    counted = np.where(ignored == 7, 0.0, sigmoid)
    wanted += [counted, counted / (ignored != 7).sum()]
    for value, oracle in zip(results, [*wanted, np.eye(4)[labels[:, 0]]], strict=True):
        assert value.shape == np.shape(oracle)
        np.testing.assert_allclose(np.asarray(value), oracle, rtol=1e-5, atol=1e-6)


def test_shapes_and_sums_equal_numpy(fluid):
    rng = np.random.default_rng(2)
    first, second = rng.normal(size=[2, 3, 4]).astype("float32"), rng.normal(size=[3]).astype("float32")
    layers = fluid.layers
    x = layers.data("x", [2, 3, 4], append_batch_size=False)
    y = layers.data("y", [3], append_batch_size=False)
    cases = {
        "axis": (layers.elementwise_mul(x, y, axis=1), first * second[:, None]),
        "flatten": (layers.flatten(x), first.reshape(2, 12)),
        "reshape": (layers.reshape(x, [0, -1]), first.reshape(2, 12)),
        "transpose": (layers.transpose(x, [2, 0, 1]), first.transpose(2, 0, 1)),
        "mul": (
            layers.mul(x, layers.transpose(x, [1, 2, 0]), 1, 2),
            first.reshape(2, 12) @ first.transpose(1, 2, 0).reshape(12, 2),
        ),
        "matmul": (layers.matmul(x, x, transpose_y=True, alpha=2.0), 2 * first @ first.transpose(0, 2, 1)),
        "all": (layers.reduce_sum(x), first.sum(keepdims=True).reshape(1)),
        "some": (layers.reduce_mean(x, dim=[0, 2]), first.mean((0, 2))),
        "concat": (layers.concat([x, x], axis=2), np.concatenate([first, first], 2)),
        "split": (layers.split(x, 3, dim=1)[1], first[:, 1:2]),
        "stack": (layers.stack([y, y], axis=1), np.stack([second, second], 1)),
        "unsqueeze": (layers.unsqueeze(y, [0]), second[None]),
        "squeeze": (layers.squeeze(layers.unsqueeze(y, [0]), [0]), second),
        "slice": (layers.slice(x, [1], [1], [3]), first[:, 1:3]),
        "scale": (layers.scale(x, 2.0, 1.0), first * 2 + 1),
        "sum": (layers.sum([x, x]), 2 * first),
        "expand": (layers.expand(y, [2]), np.tile(second, 2)),
        "cast": (layers.cast(x, "int32"), first.astype("int32")),
        "leaky": (layers.leaky_relu(x, 0.1), np.where(first > 0, first, first * np.float32(0.1))),
        "constant": (layers.fill_constant([2], "float32", 3.0), np.full(2, 3.0)),
        "ones": (layers.ones([2], "int32"), [1, 1]),
        "zeros": (layers.zeros([2], "int32"), [0, 0]),
        "assign": (layers.assign(y), second),
        "gather": (layers.gather(y, layers.fill_constant([2], "int32", 1)), second[[1, 1]]),
        "argmax": (layers.argmax(x, 1), first.argmax(1)),
        "best": (layers.topk(x, 2)[0], np.sort(first)[..., :-3:-1]),
        "where": (layers.topk(x, 2)[1], np.argsort(first)[..., :-3:-1]),
        "relu": (layers.relu(x), np.maximum(first, 0)),
        "relu6": (layers.relu6(x, 0.5), first.clip(0, 0.5)),
        "elu": (layers.elu(x, 2.0), np.where(first > 0, first, 2 * np.expm1(first))),
        "sigmoid": (layers.sigmoid(x), 1 / (1 + np.exp(-first))),
        "tanh": (layers.tanh(x), np.tanh(first)),
        "softplus": (layers.softplus(x), np.log1p(np.exp(first))),
        "square": (layers.square(x), first**2),
        "abs": (layers.abs(x), np.abs(first)),
        "sqrt": (layers.sqrt(layers.square(x)), np.abs(first)),
        "log": (layers.log(layers.exp(x)), first),
        "pow": (layers.pow(x, 3.0), first**3),
        "clip": (layers.clip(x, -0.5, 0.25), first.clip(-0.5, 0.25)),
        "first axis": (layers.softmax(x, axis=0), np.exp(first) / np.exp(first).sum(0)),
        "added": (layers.elementwise_add(x, x, act="relu"), np.maximum(2 * first, 0)),
        "subtracted": (layers.elementwise_sub(x, y, 1), first - second[:, None]),
        "divided": (layers.elementwise_div(x, y, 1), first / second[:, None]),
        "larger": (layers.elementwise_max(x, y, 1), np.maximum(first, second[:, None])),
        "smaller": (layers.elementwise_min(x, y, 1), np.minimum(first, second[:, None])),
        "max": (layers.reduce_max(x, 0, keep_dim=True), first.max(0, keepdims=True)),
        "min": (layers.reduce_min(x), first.min().reshape(1)),
    }
    results = run(fluid, [value for value, _ in cases.values()], {"x": first, "y": second})
    for (name, (_, oracle)), value in zip(cases.items(), results, strict=True):
        assert value.shape == np.shape(oracle), name
        np.testing.assert_allclose(np.asarray(value), oracle, rtol=1e-5, atol=1e-5, err_msg=name)


def test_layers_with_parameters_equal_numpy(fluid):
    rng = np.random.default_rng(3)
    image = rng.normal(size=[2, 1, 4, 4]).astype("float32")
    layers = fluid.layers
    x = layers.data("x", [1, 4, 4])
    ones = fluid.initializer.Constant(1.0)
    fetch = [
        layers.conv2d(x, 1, 2, stride=2, param_attr=ones),
        layers.pool2d(x, 2, "avg", 2),
        layers.pool2d(x, pool_type="max", global_pooling=True),
        layers.batch_norm(x, epsilon=0.0),
        layers.layer_norm(x, epsilon=0.0),
        layers.fc(x, 1, param_attr=ones, bias_attr=fluid.initializer.Constant(0.5)),
        layers.conv2d_transpose(x, 1, filter_size=2, stride=2, param_attr=ones),
        layers.fc(layers.data("rows", [4, 4]), 1, param_attr=ones),
        layers.batch_norm(layers.data("last", [4, 4, 3]), epsilon=0.0, data_layout="NHWC"),
    ]
    last = rng.normal(size=[2, 4, 4, 3]).astype("float32")
    results = run(fluid, fetch, {"x": image, "rows": image[:, 0], "last": last})
    blocks = image.reshape(2, 1, 2, 2, 2, 2)
    flat = image.reshape(2, -1)
    wanted = [
        blocks.sum((3, 5)),
        blocks.mean((3, 5)),
        image.max((2, 3), keepdims=True),
        (image - image.mean()) / image.std(),
        ((flat - flat.mean(1, keepdims=True)) / flat.std(1, keepdims=True)).reshape(image.shape),
        flat.sum(1, keepdims=True) + 0.5,
        image.repeat(2, 2).repeat(2, 3),
        flat.sum(1, keepdims=True),
        (last - last.mean((0, 1, 2))) / last.std((0, 1, 2)),
    ]
    for value, oracle in zip(results, wanted, strict=True):
        assert value.shape == oracle.shape
        np.testing.assert_allclose(np.asarray(value), oracle, rtol=1e-4, atol=1e-5)


def test_weights_of_a_convolution_begin_as_large_as_fluids(fluid):
    """Normal, with a variance of 2 by the elements of a kernel; five standard errors of 9,216 weights."""
    fluid.layers.conv2d(fluid.layers.data("x", [4, 8, 8]), 256, 3, param_attr="kernels", bias_attr=False)
    run(fluid, [], {"x": np.zeros([1, 4, 8, 8], "float32")})
    kernels = np.array(fluid.global_scope().find_var("kernels").get_tensor())
    assert kernels.size == 9216
    assert kernels.std() == pytest.approx(math.sqrt(2 / (3 * 3 * 4)), rel=5 / math.sqrt(2 * 9216))


def test_parameters_of_one_name_are_one_parameter(fluid):
    """Two look-ups in one table: the update is that of the sum of both gradients."""
    layers = fluid.layers
    words = [layers.data(name, [1], dtype="int64") for name in ("a", "b")]
    attr = fluid.ParamAttr(name="shared_table", initializer=fluid.initializer.Constant(0.0))
    rows = [layers.embedding(word, [3, 1], param_attr=attr) for word in words]
    loss = layers.reduce_sum(layers.concat(rows, axis=1))
    fluid.optimizer.SGD(1.0).minimize(loss)
    assert [parameter.name for parameter in fluid.default_main_program().all_parameters()] == ["shared_table"]
    run(fluid, [loss], {"a": [[0], [1]], "b": [[0], [2]]})
    table = np.array(fluid.global_scope().find_var("shared_table").get_tensor())
    assert table.ravel().tolist() == [-2.0, -1.0, -1.0]


def test_a_clone_for_tests_drops_nothing_and_finds_the_values_of_its_program(fluid):
    x = fluid.layers.data("x", [64])
    dropped = fluid.layers.dropout(x, 0.5)
    total = fluid.layers.reduce_sum(dropped)
    test = fluid.default_main_program().clone(for_test=True)
    executor = fluid.Executor(fluid.CPUPlace())
    feed = {"x": np.ones([1, 64], "float32")}
    kept = executor.run(test, feed=feed, fetch_list=[dropped, total])
    assert kept[0].ravel().tolist() == [0.5] * 64  # fluid's dropout scales in inference
    assert float(kept[1]) == 32.0
    assert 0.0 in executor.run(feed=feed, fetch_list=[dropped])[0]


def test_optimizers_take_fluids_arguments(fluid):
    """Gradient 4 plus decay 0.5 * 2, clipped to 3, times the learning rate 0.5."""
    weight = fluid.layers.create_parameter(
        [1], "float32", "w_decayed", default_initializer=fluid.initializer.Constant(2.0)
    )
    loss = fluid.layers.reduce_sum(weight * 4.0)
    optimizer = fluid.optimizer.SGDOptimizer(
        learning_rate=0.5,
        regularization=fluid.regularizer.L2DecayRegularizer(regularization_coeff=0.5),
        grad_clip=fluid.clip.GradientClipByGlobalNorm(clip_norm=3.0),
    )
    optimizer.minimize(loss, parameter_list=["w_decayed"])
    run(fluid, [loss])
    # Paddle clips the gradient first and decays then, as fluid did.
    assert np.array(fluid.global_scope().find_var("w_decayed").get_tensor()).tolist() == [2.0 - 0.5 * (3.0 + 1.0)]


@pytest.mark.parametrize(
    "name", ["Momentum", "Adam", "Adamax", "Adagrad", "RMSProp", "Lamb", "MomentumOptimizer", "AdamOptimizer"]
)
def test_optimizers_train(fluid, name):
    x = fluid.layers.data("x", [2])
    loss = fluid.layers.mean(fluid.layers.square(fluid.layers.fc(x, 1)))
    arguments = {"Momentum": (0.01, 0.9), "MomentumOptimizer": (0.01, 0.9)}.get(name, (0.01,))
    getattr(fluid.optimizer, name)(*arguments).minimize(loss)
    executor = fluid.Executor()
    executor.run(fluid.default_startup_program())
    feed = {"x": np.ones([1, 2], "float32")}
    losses = [float(executor.run(feed=feed, fetch_list=[loss])[0]) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("piecewise_decay", ([2, 4], [1.0, 0.5, 0.25]), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ("exponential_decay", (1.0, 2, 0.25), [0.25 ** (step / 2) for step in range(6)]),
        ("exponential_decay", (1.0, 2, 0.25, True), [1, 1, 0.25, 0.25, 0.0625, 0.0625]),
        ("polynomial_decay", (1.0, 4, 0.0), [1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine_decay", (1.0, 2, 2), [1, 1, 0.5, 0.5, 0, 0]),
        ("noam_decay", (4, 2), [0.5 * min(n**-0.5, 2**-1.5 * n) for n in range(1, 7)]),
    ],
)
def test_learning_rates_follow_the_steps(fluid, name, arguments, expected):
    """The executor counts: the parameter falls by the learning rate in every run."""
    weight = fluid.layers.create_parameter([1], "float32", default_initializer=fluid.initializer.Constant(0.0))
    loss = fluid.layers.reduce_sum(weight)
    schedule = getattr(fluid.layers, name)(*arguments)
    assert isinstance(schedule, Schedule)
    fluid.optimizer.SGD(schedule).minimize(loss)
    executor = fluid.Executor()
    executor.run(fluid.default_startup_program())
    values = [0.0, *(float(executor.run(fetch_list=[weight])[0]) for _ in expected)]
    falls = [before - after for before, after in itertools.pairwise(values)]
    assert falls == pytest.approx(expected, abs=1e-6)


def test_feeder_makes_batches(fluid):
    x, y = fluid.layers.data("x", [2, 2]), fluid.layers.data("y", [1], dtype="int64")
    feed = fluid.DataFeeder([x, y], fluid.CPUPlace()).feed([([1.0, 2.0, 3.0, 4.0], 1), (np.zeros([2, 2]), [0])])
    assert (feed["x"].shape, feed["x"].dtype) == ((2, 2, 2), np.float32)
    assert feed["y"].tolist() == [[1], [0]]
    named = fluid.DataFeeder(["x", "y"]).feed([([1.0, 2.0, 3.0, 4.0], 1), (np.zeros([2, 2]), [0])])
    assert all((named[name] == feed[name]).all() for name in ("x", "y"))
    with pytest.raises(ampx.InvalidOptionError, match="no input or parameter"):
        fluid.DataFeeder(["z"])


def test_one_element_converts_and_prints_as_old_scripts_do(fluid):
    (value,) = run(fluid, [fluid.layers.fill_constant([1], "float32", 0.5)])
    assert (float(value), value[0], f"{value[0]:.2f}", math.isclose(value, 0.5)) == (0.5, 0.5, "0.50", True)
    assert repr(value) == repr(np.array([0.5], "float32"))


# -- install -----------------------------------------------------------------------------------------------------


def test_install_offers_every_module_and_uninstall_leaves_no_trace():
    assert importlib.util.find_spec("paddle.fluid") is None
    before = set(sys.modules)
    ampx_paddle.fluid.install()
    ampx_paddle.fluid.install()
    try:
        import paddle.fluid as fluid
        import paddle.fluid.contrib.mixed_precision.decorator as decorator
        from paddle.fluid.layers import fc

        assert fluid is ampx_paddle.fluid is paddle.fluid
        assert decorator.decorate is fluid.contrib.mixed_precision.decorate
        assert fc is fluid.layers.fc
        assert not paddle.in_dynamic_mode()
    finally:
        ampx_paddle.fluid.uninstall()
    assert paddle.in_dynamic_mode()
    assert {name for name in sys.modules if name.startswith("paddle.fluid")} <= before
    assert not hasattr(paddle, "fluid")
    ampx_paddle.fluid.uninstall()
