"""Paddle's simulated GPU: it rounds as NumPy does, computes nothing silently in float32, and shows planted faults."""

import contextlib
import functools
import math
import runpy

import numpy as np
import paddle
import pytest

import ampx
import simulated_paddle
from ampx.numerics.diagnose_script import diagnose_script
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings
from ampx.run.program import Program
from ampx_paddle import casting, gradients
from processes import run_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_paddle.started(), reason="there is no simulated GPU for paddle"),
]
F = paddle.nn.functional
VALUES = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")


@pytest.fixture(autouse=True)
def _device():
    paddle.set_device("gpu")
    paddle.seed(0)
    yield
    ampx.shutdown()


def nearest(values, bits, smallest):
    """Round to so many binary digits, ties to even, by arithmetic in float64; the smallest normal has the last ones."""
    wide = np.asarray(values, np.float64)
    digit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(wide), 1e-300))), math.log2(smallest)) - bits)
    return np.rint(wide / digit) * digit


def test_casts_round_to_the_nearest():
    random = np.random.default_rng(0)
    values = (random.normal(size=100_000) * np.exp2(random.integers(-30, 17, 100_000))).astype("float32")
    ties = np.float32(1 + np.arange(64) * 2.0**-12)
    special = np.float32([0.0, -0.0, 65504, 65519.99, 65520, -65520, 2.0**-24, 2.0**-25, math.inf, -math.inf, math.nan])
    values = np.concatenate([values, ties, special])
    tensor = paddle.to_tensor(values)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(tensor.astype("float16").numpy(), expected)
    np.testing.assert_array_equal(tensor.astype("float16").astype("float32").numpy(), expected.astype("float32"))
    finite = values[np.isfinite(values)]
    rounded = paddle.to_tensor(finite).astype("bfloat16").astype("float32").numpy()
    np.testing.assert_array_equal(rounded, nearest(finite, 7, 2.0**-126))


def train(device):
    """Train a small convolutional network in float32; give its losses and its weights."""
    paddle.set_device(device)
    paddle.seed(0)
    model = paddle.nn.Sequential(
        paddle.nn.Conv2D(1, 4, 3),
        paddle.nn.ReLU(),
        paddle.nn.MaxPool2D(2),
        paddle.nn.Flatten(),
        paddle.nn.Linear(36, 3),
    )
    optimizer, losses = paddle.optimizer.AdamW(0.01, parameters=model.parameters()), []
    inputs = paddle.to_tensor(np.random.default_rng(0).normal(size=(6, 1, 8, 8)).astype("float32"))
    for _ in range(5):
        loss = F.cross_entropy(model(inputs), paddle.arange(6) % 3)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, [parameter.tolist() for parameter in model.parameters()]


def test_a_training_in_float32_has_the_numbers_of_the_cpu():
    """Paddle writes gradients in place, where kernels ask which tensors share memory."""
    assert train("gpu") == train("cpu")


OPERATIONS = {
    "add": lambda x: x + x * 0.3,
    "batch_norm": lambda x: F.batch_norm(x, paddle.zeros([6]), paddle.ones([6]), training=True),
    "concat": lambda x: paddle.concat([x, x]),
    "conv2d": lambda x: F.conv2d(x.reshape([1, 1, 4, 6]), paddle.ones([2, 1, 3, 3], x.dtype)),
    "embedding": lambda x: F.embedding(paddle.to_tensor([1, 3]), x),
    "gelu": F.gelu,
    "layer_norm": lambda x: F.layer_norm(x, 6),
    "matmul": lambda x: x @ x.t(),
    "mean": lambda x: x.mean(),
    "relu": F.relu,
    "softmax": F.softmax,
    "sum": lambda x: x.sum(0),
    "tanh": paddle.tanh,
}
ONE_STEP = ("concat", "conv2d", "embedding", "gelu", "layer_norm", "matmul", "mean", "relu", "softmax", "sum", "tanh")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_float32_rounded(name, dtype):
    """And its gradient has the dtype of what it is the gradient of."""
    low = paddle.to_tensor(VALUES).astype(dtype)
    low.stop_gradient = False
    result = OPERATIONS[name](low)
    result.sum().backward()
    assert (str(result.dtype)[7:], str(low.grad.dtype)[7:]) == (dtype, dtype)
    if name in ONE_STEP:
        exact = OPERATIONS[name](low.detach().astype("float32")).astype(dtype)
        np.testing.assert_array_equal(result.astype("float32").numpy(), exact.astype("float32").numpy())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("row", [[0.0] * 7 + [math.nan], [0.0] * 7 + [math.inf], [-math.inf] * 8], ids=str)
def test_a_softmax_hides_nothing(row, dtype):
    """As on a GPU. The CPU's kernels make finite numbers of such rows where these have eight elements."""
    logits = paddle.to_tensor([[0.0] * 8, row]).astype(dtype)
    logits.stop_gradient = False
    loss = F.cross_entropy(logits, paddle.to_tensor([0, 0]), reduction="none")
    loss.sum().backward()
    results = (F.softmax(logits), F.log_softmax(logits.t(), 0).t(), logits.grad)
    for result in (loss.reshape([2, 1]), *results):
        values = result.astype("float32").numpy()
        assert np.isfinite(values[0]).all()
        assert np.isnan(values[1]).all()


def test_an_operation_without_a_kernel_is_refused():
    with pytest.raises(RuntimeError, match="is not registered"):
        paddle.linalg.svd(paddle.ones([2, 2], "float16"))


def test_views_are_read_and_written_where_they_lie():
    low = paddle.to_tensor(VALUES).astype("float16")
    expected = VALUES.astype(np.float16)
    np.testing.assert_array_equal(low.t()[1:4, ::2].numpy(), expected.T[1:4, ::2])
    low[1:3, ::3] = paddle.zeros([2, 2], "float16")
    expected[1:3, ::3] = 0
    np.testing.assert_array_equal(low.numpy(), expected)


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam", "AdamW"])
def test_an_optimizer_computes_with_the_master_copy(kind):
    """It takes the same steps as that of a float32 parameter, bit by bit, of gradients that float16 holds."""
    slopes = [np.round(VALUES * 8) / 8, np.round(VALUES[::-1] * 4) / 4]
    runs = {}
    for dtype in ("float32", "float16"):
        layer = paddle.nn.Linear(6, 4, bias_attr=False)
        layer.weight.set_value(VALUES.T.astype(np.float16).astype("float32"))
        options = {} if dtype == "float32" else {"multi_precision": True}
        optimizer = getattr(paddle.optimizer, kind)(2.0**-12, parameters=layer.parameters(), **options)
        layer.to(dtype=dtype)
        for slope in slopes:
            layer.weight._set_grad_ivar(paddle.to_tensor(slope.T.copy()).astype(dtype))
            optimizer.step()
        runs[dtype] = optimizer._master_weights[layer.weight.name] if dtype == "float16" else layer.weight
        if dtype == "float16":
            np.testing.assert_array_equal(layer.weight.numpy(), runs[dtype].numpy().astype(np.float16))
    np.testing.assert_array_equal(runs["float16"].numpy(), runs["float32"].numpy())


@pytest.mark.filterwarnings("ignore:Accumulating with FP16 or BF16:UserWarning")
def test_an_optimizer_without_master_copies_keeps_its_state_of_one_element():
    """A power of beta has the shape of a master copy then."""
    weight = paddle.create_parameter([1], "float16")
    optimizer = paddle.optimizer.AdamW(0.1, beta2=0.5, parameters=[weight])
    for _ in range(2):
        weight._set_grad_ivar(paddle.ones([1], "float16"))
        optimizer.step()
    (power,) = optimizer._accumulators["beta2_pow_acc"].values()
    assert power.item() == 0.5**3


def computes_in(dtype):
    ampx.init("paddle", dtype=dtype)
    return str((paddle.ones([2, 2]) @ paddle.ones([2, 2])).dtype).removeprefix("paddle.")


def overflow_is_found():
    """Unscale gradients by less than one, which float32 holds and float16 does not."""
    return bool(gradients._unscale_dense([paddle.full([3], 300.0, "float16")], paddle.float16, 2.0**-10))


def test_gradients_of_recurrent_layers_are_those_of_float32():
    """Paddle puts the weights of such layers on the host here, where it lays them out in one piece."""
    lstm, inputs = paddle.nn.LSTM(4, 3), paddle.rand([2, 5, 4])
    outputs, _ = lstm(inputs)
    outputs.square().sum().backward()
    expected = [parameter.grad.tolist() for parameter in lstm.parameters()]
    lstm.clear_gradients()
    ampx.init("paddle", level="O0", loss_scale=2.0**10)
    optimizer = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=lstm.parameters()))
    outputs, _ = lstm(inputs)
    with ampx.scale_loss(outputs.square().sum(), optimizer) as scaled:
        scaled.backward()
    ampx.unscale(optimizer)
    assert [parameter.grad.tolist() for parameter in lstm.parameters()] == expected


def test_planted_faults_are_seen(monkeypatch):
    """What only a GPU shows: a region that casts nothing, a check of gradients before they are low precision."""
    assert computes_in("float16") == "float16"
    ampx.shutdown()

    def checked_too_early(batch, dtype, scale):
        wide = [tensor.astype("float32") for tensor in batch]
        _, overflow = paddle._C_ops.check_finite_and_unscale_(wide, paddle.full([1], scale, "float32"))
        return overflow

    assert overflow_is_found()
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "_unscale_dense", checked_too_early)
        assert not overflow_is_found()
    with monkeypatch.context() as patch:
        patch.setattr(casting, "region", lambda plan, enabled: contextlib.nullcontext())
        assert computes_in("float16") == "float32"


SCRIPT = """
import paddle

paddle.set_device("gpu")
paddle.seed(0)


class Wide(paddle.nn.Layer):
    def forward(self, x):
        return x * 1e5 * 1e-5  # beyond float16


model = paddle.nn.Sequential(paddle.nn.Linear(8, 16), Wide(), paddle.nn.Linear(16, 1))
optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
LINES
losses = []
for _ in range(20):
    loss = (model(paddle.ones([4, 8])) ** 2).mean()
    BACKWARD
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
"""


def losses_by_hand(folder, *lines):
    """Run the script, with ampx by hand where there are lines; return losses of three steps that were applied."""
    wrapped = ("import ampx", *lines, "optimizer = ampx.wrap_optimizer(optimizer)") if lines else ()
    backward = "with ampx.scale_loss(loss, optimizer) as scaled: scaled.backward()" if lines else "loss.backward()"
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("LINES", "\n".join(wrapped)).replace("BACKWARD", backward))
    try:
        losses = runpy.run_path(str(path))["losses"]
        return list(dict.fromkeys(losses))[:3]  # behind a skipped step, the same weights see the same batch again
    finally:
        ampx.shutdown()


def test_what_tune_and_diagnose_say_is_pasted_and_cures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the policy file is looked for
    exact = losses_by_hand(tmp_path)
    settings, program = RunSettings("float16", device="gpu"), Program(str(tmp_path / "train.py"))
    options = {"framework": "paddle", "run": functools.partial(run_here, folder=tmp_path)}
    policy, report = tune_script(program, settings, steps=3, repeats=0, out="mine.toml", **options)
    assert [choice.entry for choice in policy.deny] == ["module:1"]
    policy.write("mine.toml")
    diagnosis, _ = diagnose_script(program, settings, **options)
    broken = losses_by_hand(tmp_path, "ampx.init(dtype='float16', device='gpu', nan_loss='skip')")
    assert not np.isfinite(broken).any()
    for lines in (report["lines"], diagnosis.advice.partition("\n# or")[0].splitlines()):
        assert losses_by_hand(tmp_path, *lines) == pytest.approx(exact, rel=policy.tolerance)
