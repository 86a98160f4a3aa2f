"""What a level is on a GPU: which operations are low, where masters are, what a skip leaves, what updates are lost."""

import numpy as np
import paddle
import pytest

import ampx
from ampx.run import Run, RunSettings
from ampx_paddle.run import automate
from ampx_paddle.scaler import GradScaler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:When training, we now always track"),
    pytest.mark.filterwarnings("ignore:Accumulating with FP16"),
    pytest.mark.skipif(
        not (paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count()), reason="no CUDA device for paddle"
    ),
]
LEVELS = [(level, dtype) for dtype in ("float16", "bfloat16") for level in ("O1", "O2", "O3")]
OPTIMIZERS = {
    "SGD": paddle.optimizer.SGD,
    "Momentum": paddle.optimizer.Momentum,
    "Adam": paddle.optimizer.Adam,
    "AdamW": paddle.optimizer.AdamW,
}
nn = paddle.nn


@pytest.fixture(autouse=True)
def _device():
    before = paddle.get_device()
    paddle.set_device("gpu")
    yield
    paddle.set_device(before)


class Training:
    """A small network with a convolution, norms and products, and the steps that train it."""

    def __init__(self, level, dtype, optimizer="AdamW", scale=1024.0):
        paddle.seed(0)
        paddle.utils.unique_name.switch()  # files go by names: those of a new process
        self.amp = ampx.init("paddle", level=level, dtype=dtype, loss_scale=scale)
        convolution = nn.Conv2D(1, 4, 3, bias_attr=False), nn.BatchNorm2D(4), nn.ReLU(), nn.Flatten()
        model = nn.Sequential(*convolution, nn.Linear(144, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        raw = OPTIMIZERS[optimizer](0.02, parameters=model.parameters())
        self.model, raw = self.amp.prepare(model, raw)
        self.opt = self.amp.wrap_optimizer(raw)
        self.inputs, self.labels = paddle.randn([6, 1, 8, 8]), paddle.arange(6) % 3

    def step(self, factor=1.0):
        with self.amp.autocast():
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        with self.amp.scale_loss(loss * factor, self.opt) as scaled:
            scaled.backward()
        self.opt.step()
        self.opt.clear_grad()
        return float(loss)

    def values(self):
        """Return the bytes of parameters and of all that the optimizer keeps."""
        state = {name: value for name, value in self.opt.optimizer.state_dict().items() if name != "LR_Scheduler"}
        masters = state.pop("master_weights", {})
        trained = [parameter for parameter in self.model.parameters() if not parameter.stop_gradient]
        tensors = [*trained, *state.values(), *masters.values()]
        return [tensor.numpy().tobytes() for tensor in tensors]


def dtypes_of(model, inputs, amp):
    """Return the dtype of every layer's output."""
    seen = {}
    hooks = [
        layer.register_forward_post_hook(lambda _, __, out, name=name: seen.update({name: str(out.dtype)[7:]}))
        for name, layer in model.named_sublayers()
    ]
    with amp.autocast():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return [seen[name] for name in sorted(seen, key=int)]


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_products_are_low_and_norms_and_losses_are_not(level, dtype):
    training = Training(level, dtype)
    seen = dtypes_of(training.model, training.inputs, training.amp)
    assert (seen[0], seen[4], seen[7]) == (dtype,) * 3  # convolution and products
    weights = [str(layer.weight.dtype)[7:] for layer in (training.model[0], training.model[4])]
    assert weights == ["float32" if level == "O1" else dtype] * 2
    norms = [str(layer.weight.dtype)[7:] for layer in (training.model[1], training.model[5])]
    assert norms == ["float32", dtype if level == "O3" else "float32"]
    with training.amp.autocast():
        outputs = training.model(training.inputs)
        loss = nn.functional.cross_entropy(outputs, training.labels)
    assert (str(outputs.dtype)[7:], loss.dtype) == (dtype, paddle.float32)


ONE_OPERATOR = {
    "cross_entropy": lambda x, y: nn.functional.cross_entropy(x, y, soft_label=True),
    "smooth_l1_loss": nn.functional.smooth_l1_loss,
    "binary_cross_entropy_with_logits": nn.functional.binary_cross_entropy_with_logits,
    "binary_cross_entropy": nn.functional.binary_cross_entropy,
    "kl_div": nn.functional.kl_div,
}


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("name", ONE_OPERATOR)
def test_losses_of_one_operator_are_float32_with_the_value_of_float32(name, level, dtype):
    inputs, labels = (paddle.rand([4, 3]).astype(dtype) for _ in range(2))
    expected = ONE_OPERATOR[name](inputs.astype("float32"), labels.astype("float32"))
    amp = ampx.init("paddle", level=level, dtype=dtype)
    with amp.autocast():
        loss = ONE_OPERATOR[name](inputs, labels)
    assert loss.dtype == paddle.float32
    assert (loss.numpy() == expected.numpy()).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_norm_is_float32_at_o1_unless_allowed(dtype):
    """A square of a float16 beyond 256 overflows, where Paddle's list has a name that no operator has."""
    values = paddle.full([4], 2.0**10).astype(dtype)
    for allow, expected in (([], "float32"), (["p_norm"], dtype)):
        amp = ampx.init("paddle", dtype=dtype, allow=allow)
        with amp.autocast():
            norm = paddle.linalg.norm(values)
        assert str(norm.dtype).removeprefix("paddle.") == expected
        if not allow:
            assert float(norm) == 2.0**11


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_leaves_every_bit(level, dtype, optimizer):
    training = Training(level, dtype, optimizer)
    training.step()
    before = training.values()
    training.step(float("inf"))
    assert not training.opt.last_step.applied
    assert training.values() == before
    training.step()
    assert training.opt.last_step.applied
    assert training.values() != before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_are_their_masters_rounded(optimizer, dtype):
    training = Training("O2", dtype, optimizer)
    for _ in range(3):
        training.step()
    masters = training.opt.optimizer._master_weights
    low = [parameter for parameter in training.model.parameters() if parameter.dtype != paddle.float32]
    assert {parameter.name for parameter in low} == set(masters)
    for parameter in low:
        master = masters[parameter.name]
        assert master.dtype == paddle.float32
        # The cast's own rounding is compared with NumPy's where the device is simulated.
        assert (master.astype(dtype).numpy() == parameter.numpy()).all()
        assert (master.numpy() != parameter.astype("float32").numpy()).any()


WRITES = {
    "set_value": lambda model, values: model.weight.set_value(values.astype("float16")),
    "set_state_dict": lambda model, values: model.set_state_dict({"weight": paddle.to_tensor(values)}),
    "copy_": lambda model, values: model.weight.copy_(paddle.to_tensor(values).astype("float16"), True),
    "assign": lambda model, values: paddle.assign(paddle.to_tensor(values).astype("float16"), model.weight),
    "initializer": lambda model, values: nn.initializer.Assign(values)(model.weight),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_weights_written_between_prepare_and_the_first_step_count(write, first):
    """Each loses half of its slope, in the parameter and in its master."""
    amp = ampx.init("paddle", level="O2", dtype="float16", loss_scale=8.0)
    model = nn.Linear(2, 1, bias_attr=False)
    opt = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    if first == "wrap":
        opt = amp.wrap_optimizer(opt)
    model, opt = amp.prepare(model, opt)
    if first == "prepare":
        opt = amp.wrap_optimizer(opt)
    with paddle.no_grad():
        WRITES[write](model, np.array([[0.25], [0.75]], "float32"))
    with amp.autocast():
        loss = model(paddle.to_tensor([[1.0, 2.0]])).sum()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    masters = opt.optimizer._master_weights.values()
    assert [values.numpy().ravel().tolist() for values in (model.weight, *masters)] == [[-0.25, -0.25]] * 2


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_meter_counts_lost_updates_as_numpy_does(level):
    """At O3 most updates of a sixteenth of a float16 digit and less are lost; the master copies of O2 take them all."""
    amp = ampx.init("paddle", level=level, dtype="float16", loss_scale=1.0)
    model, rate = nn.Linear(3, 1000, bias_attr=False), 2.0**-14
    model.weight.set_value((1 + np.random.default_rng(0).random((3, 1000))).astype("float32"))
    model, raw = amp.prepare(model, paddle.optimizer.SGD(rate, parameters=model.parameters()))
    opt = amp.wrap_optimizer(raw)
    slopes = np.random.default_rng(1).integers(0, 16, (3, 1000)).astype("float32")
    for step in range(1, 101):
        with amp.scale_loss((model.weight.astype("float32") * paddle.to_tensor(slopes)).sum(), opt) as scaled:
            scaled.backward()
        if step == 100:
            updated = raw._master_weights[model.weight.name] if level == "O2" else model.weight
            before = updated.numpy()
        opt.step()
        opt.clear_grad()
    after = (before.astype("float32") - np.float32(rate) * slopes).astype(before.dtype)
    assert (updated.numpy() == after).all()
    lost = ((after == before) & (slopes != 0)).sum() / (slopes != 0).sum()
    assert opt.meter.lost == lost
    assert (lost == 0) if level == "O2" else (0.3 < lost < 0.7)


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_a_checkpoint_is_plain_float32_and_a_resumed_training_equals_one_that_went_on(level, dtype, tmp_path):
    first = Training(level, dtype, scale="dynamic")
    for factor in (1.0, float("inf"), 1.0):
        first.step(factor)
    paddle.save(first.model.state_dict(), str(tmp_path / "model"))
    paddle.save(first.opt.state_dict(), str(tmp_path / "optimizer"))
    scale = first.amp.state_dict()
    losses, values = [first.step() for _ in range(3)], first.values()
    ampx.shutdown()

    second = Training(level, dtype, scale="dynamic")
    second.model.set_state_dict(paddle.load(str(tmp_path / "model")))
    second.opt.set_state_dict(paddle.load(str(tmp_path / "optimizer")))
    second.amp.load_state_dict(scale)
    assert [second.step() for _ in range(3)] == losses
    assert second.values() == values
    ampx.shutdown()

    saved = paddle.load(str(tmp_path / "model"))
    assert {str(value.dtype)[7:] for value in saved.values()} == {"float32"}
    plain = Training("O0", "float32")  # which knows nothing of low precision
    plain.model.set_state_dict(saved)
    assert np.isfinite(plain.step())


@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_training_learns(level, dtype):
    training = Training(level, dtype)
    losses = [training.step() for _ in range(25)]
    assert losses[-1] < losses[0] / 4


class Recording(nn.Linear):
    """A product that notes the dtype in which it was computed."""

    def forward(self, inputs):
        output = super().forward(inputs)
        self.computed_in = str(output.dtype).removeprefix("paddle.")
        return output


def high_level(wrap=lambda optimizer: optimizer, **configs):
    """A `paddle.Model` prepared for a regression, and its layer."""
    layer = Recording(4, 1)
    model = paddle.Model(layer)
    model.prepare(wrap(paddle.optimizer.SGD(0.1, parameters=layer.parameters())), nn.MSELoss(), **configs)
    return model, layer


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"dtype": "float16", "loss_scale": 8.0}, "float16"),
        ({"dtype": "bfloat16", "loss_scale": 8.0}, "bfloat16"),
        ({"dtype": "float16", "deny": ["matmul", "linear"]}, "float32"),
    ],
)
def test_a_model_with_loops_of_its_own_casts_as_the_session_says(options, dtype):
    """Paddle's casts to float16 by its own lists."""
    amp = ampx.init("paddle", **options)
    opt = None

    def wrap(optimizer):
        nonlocal opt
        opt = amp.wrap_optimizer(optimizer)
        return opt

    model, layer = high_level(wrap, amp_configs="O1")
    GradScaler(opt).attach(model)
    model.train_batch([np.ones([2, 4], "float32")], [np.ones([2, 1], "float32")])
    assert layer.computed_in == dtype
    assert opt.last_step.applied


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_with_loops_of_its_own_predicts_numbers(dtype):
    """Paddle gives NumPy the bits of bfloat16."""
    amp = ampx.init("paddle", dtype=dtype, loss_scale=8.0)
    optimizers = []
    model, _ = high_level(
        lambda optimizer: optimizers.append(amp.wrap_optimizer(optimizer)) or optimizers[0], amp_configs="O1"
    )
    for _ in range(2):
        GradScaler(*optimizers).attach(model)
    inputs = np.ones([2, 4], "float32")
    (predicted,) = model.predict_batch([inputs])
    with amp.autocast(enabled=False):
        expected = model.network(paddle.to_tensor(inputs)).numpy()
    assert predicted.dtype == np.float32
    np.testing.assert_allclose(predicted, expected, rtol=2.0**-6)


def test_a_model_with_loops_of_its_own_is_refused_where_the_session_casts_nothing():
    amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
    optimizers = []
    model, _ = high_level(
        lambda optimizer: optimizers.append(amp.wrap_optimizer(optimizer)) or optimizers[0], amp_configs="O1"
    )
    with pytest.raises(ampx.InvalidOptionError, match="level O0"):
        GradScaler(*optimizers).attach(model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ampx_run_casts_in_the_loops_of_a_model(dtype):
    """Which switches casting off around its network, where its own is not on."""
    run = Run("paddle", RunSettings(dtype=dtype, device="gpu"))
    with automate(run):
        model, layer = high_level()
        model.train_batch([np.ones([2, 4], "float32")], [np.ones([2, 1], "float32")])
    assert layer.computed_in == dtype
