"""`ampx run` in PaddlePaddle: scripts that know nothing of ampx."""

import json
import os
import pathlib
import sys

import numpy as np
import paddle
import pytest

import ampx
from ampx.backend import offer
from ampx.numerics.probe import Probe, Watching
from ampx.run import LossCurve, Run, RunSettings
from ampx_paddle.run import automate
from ampx_paddle.step import AmpOptimizer
from processes import last_json, run_python

PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"

# Paddle says so of its own LBFGS and Model.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")


@pytest.fixture
def run():
    return Run("paddle", RunSettings(level="O0", device="cpu"))


def both_ways(run, train):
    """Train on Paddle as it is, then automated and scaled; loss scales are powers of two, so that results are equal."""
    plain = train()
    with automate(run):
        run.session(loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
        return plain, train()


@pytest.fixture
def scaling(run):
    with automate(run):
        run.session(loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
        yield run


def network():
    paddle.seed(3)
    return paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))


def weights(net):
    return [parameter.tolist() for parameter in net.parameters()]


def batches(count, overflow=()):
    rng = np.random.default_rng(0)
    for position in range(count):
        values = rng.normal(size=(5, 3)).astype("float32")
        if position in overflow:
            values[0, 0] = np.inf
        yield paddle.to_tensor(values)


# -- who looks on ------------------------------------------------------------------------------------------------


class Watcher:
    """Looks on as `ampx compare` and `ampx diagnose` do: watches the second step."""

    def __init__(self, run):
        self.backend, self.losses, self.steps, self.regions, self.readings = run.session().backend, [], 0, [], []

    def loss(self, read):
        self.losses.append(read)

    def stepped(self, steps):
        self.steps = steps
        for region, watch in self.regions:
            self.readings += watch.readings()
            region.__exit__(None, None, None)
        region = offer(self.backend, Probe).watch(None, Watching())
        self.regions = [(region, region.__enter__())] if steps == 1 else []


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")
def test_whole_steps_under_to_static_train_as_in_plain_paddle(run):
    """The optimizer is wrapped in the first of them. Plain Paddle trains eagerly."""

    def train():
        net = network()
        opt = paddle.optimizer.AdamW(0.1, parameters=net.parameters())

        def step(inputs):
            loss = net(inputs).square().mean()
            loss.backward()
            opt.step()
            opt.clear_grad()
            return loss

        step = paddle.jit.to_static(step, full_graph=False) if run.amp else step
        return [float(step(inputs)) for inputs in batches(4)], weights(net)

    plain, automated = both_ways(run, train)
    assert automated == plain
    assert [optimizer.steps for optimizer in run.recorder.optimizers.values()] == [4]


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")
@pytest.mark.parametrize("dtype", ["scaled", "float32"])
def test_who_looks_on_reads_true_losses_and_the_layers_of_a_compiled_step(dtype):
    net = network()
    compiled = paddle.jit.to_static(net, full_graph=True)
    opt_of, expected = (lambda: paddle.optimizer.SGD(0.1, parameters=net.parameters())), []
    run = Run("paddle", RunSettings(level="O1" if dtype == "float32" else "O0", dtype="float32", device="cpu"))
    with automate(run):
        if dtype == "scaled":
            run.session(loss_scale=2.0**10)
        opt = opt_of()
        observer = run.recorder.observer = Watcher(run)
        for batch in batches(3):
            loss = (compiled(batch) ** 2).mean()
            expected.append(float(loss))
            loss.backward()
            opt.step()
            opt.clear_grad()
    assert [read() for read in observer.losses] == expected
    assert observer.steps == 3
    seen = [(reading.module, reading.direction) for reading in observer.readings]
    assert seen[:4] == [("0", "forward"), ("1", "forward"), ("2", "forward"), ("", "forward")]
    assert {name for name, direction in seen if direction == "backward"} == {"0", "1", "2", ""}


# -- scripts -----------------------------------------------------------------------------------------------------


def metric(*command):
    return last_json("-W", "ignore", *command)


@pytest.mark.parametrize(("name", "length"), [("paddle_plain.py", ("--epochs", "4")), ("paddle_static.py", ())])
def test_an_unedited_script_reaches_the_accuracy_of_float32(tmp_path, name, length):
    """450 images: the standard error of a share of 0.97 is 0.008, that of a difference of two 0.0114; twice that.

    Eager Paddle computes float32 on a CPU, and the losses are the same ones; in a static graph it casts.
    """
    pytest.importorskip("typer", reason="the command line is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script, report = str(PROGRAMS / "plain" / name), tmp_path / "out.json"
    plain, mixed = metric(script, *length), metric("-m", "ampx", "run", "--report", str(report), script, *length)
    assert plain["metric"] > 0.95
    assert abs(mixed["metric"] - plain["metric"]) < 0.023
    facts = json.loads(report.read_text())
    assert (mixed["losses"] == plain["losses"]) is (facts["dtype"] == "float32")
    assert facts["steps"] >= len(mixed["losses"])
    products = {
        operation["dtype"] for operation in facts["ops"] if operation["op"] in ("matmul", "matmul_v2", "conv2d")
    }
    assert products == {facts["dtype"]}


def test_scripts_for_fluid_run_whether_they_ask_for_mixed_precision_or_not():
    pytest.importorskip("typer", reason="the command line is not installed")
    script = str(PROGRAMS / "fluid" / "word2vec.py")
    for arguments in ((), ("--use_amp",)):
        accuracy = metric("-m", "ampx", "run", script, "--steps", "30", *arguments)
        assert accuracy["losses"][-1] < accuracy["losses"][0] - 0.5


STATIC = """
import sys
import numpy as np
import paddle.fluid as fluid

x = fluid.data("x", [None, 4])
loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.fc(x, 8), 1))
def make_optimizer():
    if "--amp" not in sys.argv:
        return fluid.optimizer.Adam(0.1)
    options = {"init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    return fluid.contrib.mixed_precision.decorate(fluid.optimizer.Adam(0.1), **options)
make_optimizer().minimize(loss, parameter_list=[p.name for p in fluid.default_main_program().all_parameters()])
executor = fluid.Executor(fluid.CPUPlace())
executor.run(fluid.default_startup_program())
for value in (1, np.inf, 1, 1, np.inf):
    executor.run(feed={"x": np.full([2, 4], value, "float32")}, fetch_list=[loss])
print("{}")
"""


def test_operators_that_a_policy_denies_compute_in_float32_in_static_programs(tmp_path):
    pytest.importorskip("typer", reason="the command line is not installed")
    script, report = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(STATIC)
    (policy := tmp_path / "ampx.toml").write_text('deny = ["matmul"]')
    metric("-m", "ampx", "run", "--policy", str(policy), "--report", str(report), str(script))
    facts = json.loads(report.read_text())
    assert {entry["dtype"] for entry in facts["ops"] if entry["op"] == "matmul"} == {"float32"}


@pytest.mark.parametrize("arguments", [(), ("--amp",)])
def test_steps_skips_and_scales_of_static_programs_are_told(tmp_path, arguments):
    """Whether the run scales, or the script by fluid's decorate, names parameters, and keeps no optimizer."""
    pytest.importorskip("typer", reason="the command line is not installed")
    script, report = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(STATIC)
    metric("-m", "ampx", "run", "--report", str(report), str(script), *arguments)
    facts = json.loads(report.read_text())
    (record,) = facts["optimizers"]
    assert (record["kind"], record["steps"], record["skipped"]) == ("AdamOptimizer", 5, [2, 5])
    if arguments:
        assert (record["initial_scale"], record["scales"]) == (1024.0, [[2, 512.0], [5, 256.0]])
        assert "by itself, with paddle.fluid.contrib.mixed_precision.decorate;" in facts["notes"][-1]
        assert facts["lines"] == ["the script has it by hand: its own calls decide"]
    assert facts["sampled_steps"] == 3
    products = {operation["dtype"]: operation["count"] for operation in facts["ops"] if operation["op"] == "matmul"}
    assert products == {facts["dtype"]: 3 * 2}


def test_what_the_scripts_own_session_did_is_told(run):
    with automate(run):
        ampx.init("paddle", level="O0", loss_scale="dynamic", nan_loss="skip")
        net = network()
        optimizer = ampx.wrap_optimizer(paddle.optimizer.Adam(0.01, parameters=net.parameters()))
        for x in batches(5, overflow=(1,)):
            with ampx.scale_loss(net(x).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.clear_grad()
    (record,) = run.recorder.optimizers.values()
    assert (record.kind, record.initial_scale, record.steps, record.skipped) == ("Adam", 65536.0, 5, [2])
    assert record.scales == [(2, 32768.0)]
    facts = run.recorder.to_json()
    assert facts["sampled_steps"] == 3
    assert run.recorder.ops["matmul_v2", "float32"] == 3 * 2
    assert set(facts["seconds"]) == {"forward", "backward", "step"}
    assert "by itself, with ampx;" in facts["notes"][0]
    assert (run.amp.effective.dtype, run.explain()) == (None, ("the script has it by hand: its own calls decide",))


# -- loops, exactly -------------------------------------------------------------------------------------------------


def simple(kind=paddle.optimizer.Momentum):
    net = network()
    optimizer = kind(0.05, parameters=net.parameters())
    optimizer.clear_grad()  # before anything is scaled
    for x in batches(8):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    return weights(net)


@pytest.mark.parametrize("kind", [paddle.optimizer.Momentum, paddle.optimizer.AdamW, paddle.optimizer.Lamb])
def test_a_plain_loop_gives_the_weights_of_float32(run, kind):
    expected, trained = both_ways(run, lambda: simple(kind=kind))
    assert trained == expected
    assert run.recorder.steps == 8
    (record,) = run.recorder.optimizers.values()
    assert (record.kind, record.initial_scale) == (kind.__name__, 2.0**10)
    ((_, place),) = record.optimizers
    assert pathlib.Path(place).name.startswith("test_automatic.py:")
    assert record.scales == [(3, 2.0**11), (6, 2.0**12)]
    assert set(run.recorder.seconds) == {"forward", "backward", "step"}


def averaged_by_hand(bad=()):
    """Gradients that the script sums over processes itself; in some steps the other process overflowed."""
    net = network()
    optimizer = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
    for position, x in enumerate(batches(6)):
        net(x).square().mean().backward()
        for parameter in net.parameters():
            other = paddle.full_like(parameter.grad, np.inf) if position in bad else parameter.grad
            parameter.grad = (parameter.grad + other) / 2
        optimizer.step()
        optimizer.clear_grad()
    return weights(net)


def test_an_overflow_that_comes_after_the_script_looked_is_skipped(scaling):
    trained = averaged_by_hand(bad=(2,))
    assert all(np.isfinite(weights).all() for weights in trained)
    (record,) = scaling.recorder.optimizers.values()
    assert record.skipped == [3]
    assert record.scales[0] == (3, 2.0**9)


def test_gradients_of_a_skipped_step_that_are_not_cleared_end_the_run(scaling):
    """They hold anything, and every later step would be skipped; plain Paddle has no skipped steps."""
    net = network()
    optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
    first, second = batches(2, overflow=(0,))
    net(first).square().mean().backward()
    optimizer.step()
    loss = net(second).square().mean()
    with pytest.raises(ampx.RunRefusedError, match="a skipped step left"):
        loss.backward()


def never_cleared():
    """Gradients of all steps add up: those of earlier steps are true already when the next backward adds to them."""
    net = network()
    optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
    for x in batches(6):
        net(x).square().mean().backward()
        optimizer.step()
    return weights(net)


def adversarial():
    """Two optimizers; the second loss reaches the parameters of the first as well."""
    first, second = network(), network()
    optimizers = [paddle.optimizer.Adam(0.01, parameters=net.parameters()) for net in (first, second)]
    for x in batches(8):
        first(x).square().mean().backward()
        optimizers[0].step()
        optimizers[0].clear_grad()
        loss = (first(x) - second(x)).square().mean()
        loss.backward()
        optimizers[1].minimize(loss)
        for optimizer in optimizers:
            optimizer.clear_gradients()
    return weights(first), weights(second)


def with_closure():
    net = network()
    (x,) = batches(1)
    optimizer = paddle.optimizer.LBFGS(max_iter=4, parameters=net.parameters())

    def closure():
        optimizer.clear_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return weights(net)


def high_level():
    net = network()
    model = paddle.Model(net)
    model.prepare(paddle.optimizer.Adam(0.01, parameters=net.parameters()), paddle.nn.MSELoss())
    for x in batches(4):
        model.train_batch([x], [paddle.ones([5, 1])])
    return weights(net)


def recomputed(use_reentrant):
    """Layers that are computed again in the backward, by a backward of Paddle's own inside of it or by none."""
    recompute = paddle.distributed.fleet.utils.recompute
    net = network()
    optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
    for position, x in enumerate(batches(4)):
        hidden = net[1](net[0](x))
        recompute(net[2], hidden, use_reentrant=use_reentrant).square().mean().backward()
        if position % 2:  # the second backward adds to gradients that are there
            optimizer.step()
            optimizer.clear_grad()
    return weights(net)


def recomputed_by_a_backward():
    return recomputed(True)


def recomputed_by_hooks():
    return recomputed(False)


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        (never_cleared, [6]),
        (adversarial, [8, 8]),
        (with_closure, [3]),
        (high_level, [4]),
        (recomputed_by_a_backward, [2]),
        (recomputed_by_hooks, [2]),
    ],
)
def test_other_ways_to_train_give_the_weights_of_float32(run, train, steps):
    expected, trained = both_ways(run, train)
    assert trained == expected
    assert [optimizer.steps for optimizer in run.recorder.optimizers.values()] == steps


def test_the_lines_by_hand_of_a_high_level_model_are_those_of_its_scaler(run):
    """Its loop is Paddle's: the script has no backward to scale."""
    with automate(run):
        high_level()
        assert "GradScaler(optimizer).attach(model)" in run.lines[-1]
        assert not any("scaled" in line for line in run.lines)


def test_the_scripts_optimizer_keeps_its_class(scaling):
    class Own(paddle.optimizer.SGD):
        calls = 0

        def step(self):
            self.calls += 1
            super().step()

    net = network()
    optimizer = Own(0.1, parameters=net.parameters())
    net(next(batches(1))).mean().backward()
    optimizer.step()
    assert type(optimizer) is Own
    assert optimizer.calls == 1
    assert scaling.recorder.steps == 1


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")  # of Paddle's own optimizers
@pytest.mark.parametrize("style", ["static", "to_static", "hapi"])
def test_the_curve_of_a_report_has_the_losses_that_the_script_sees(run, style):
    curve, losses = LossCurve(), []
    run.recorder.curve = curve
    with automate(run):
        if style == "static":
            losses = list(losses_of_a_program(5))
        elif style == "hapi":
            losses = list(losses_of_hapi(5))
        else:
            net = network()
            optimizer = paddle.optimizer.Adam(0.01, parameters=net.parameters())
            forward = paddle.jit.to_static(net) if style == "to_static" else net

            def step(x):
                loss = forward(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                return loss

            losses = [float(step(x)) for x in batches(5)]
    assert len(set(losses)) == 5
    assert [point[:2] for point in curve.points()] == [
        (number, pytest.approx(loss, rel=1e-6)) for number, loss in enumerate(losses, 1)
    ]


def losses_of_a_program(count):
    paddle.enable_static()
    try:
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.static.scope_guard(paddle.static.Scope()):
            x = paddle.static.data("x", [5, 3])
            loss = network()(x).square().mean()
            paddle.optimizer.Adam(0.01).minimize(loss)
            executor = paddle.static.Executor(paddle.CPUPlace())
            executor.run(startup)
            rng = np.random.default_rng(0)
            for _ in range(count):
                feed = {"x": rng.normal(size=(5, 3)).astype("float32")}
                yield float(executor.run(main, feed=feed, fetch_list=[loss])[0])
    finally:
        paddle.disable_static()


def losses_of_hapi(count):
    net = network()
    model = paddle.Model(net)
    model.prepare(paddle.optimizer.Adam(0.01, parameters=net.parameters()), paddle.nn.MSELoss())
    for x in batches(count):
        yield float(model.train_batch([x], [paddle.ones([5, 1])])[0])


def skipping(run, overflows, step):
    """Step, but where a step of plain float32 stands for one that ampx skips."""
    if run.amp is not None or not overflows:
        step()


@pytest.mark.parametrize("overflows_at", [None, 0, 2])
def test_gradients_of_a_skipped_step_may_be_cleared_before_the_next_backward_of_their_optimizer(run, overflows_at):
    """As in adversarial training: the other network's loss reaches them before."""

    def train():
        first, second = network(), paddle.nn.Linear(1, 1)
        pair = [paddle.optimizer.Momentum(0.1, 0.5, parameters=net.parameters()) for net in (first, second)]
        for position, inputs in enumerate(batches(5)):
            overflows = position == overflows_at
            outputs = first(inputs)
            loss = second(outputs.detach()).square().mean()
            pair[1].clear_grad()
            (loss * float("inf") if overflows else loss).backward()
            skipping(run, overflows, pair[1].step)
            pair[0].clear_grad()
            second(outputs).mean().backward()
            pair[0].step()
        return weights(first), weights(second)

    plain, automated = both_ways(run, train)
    assert automated == plain


def test_gradients_that_are_left_stay_true_while_the_scale_of_another_optimizer_moves(run):
    def train():
        first, second = network(), network()
        pair = [paddle.optimizer.SGD(0.1, parameters=net.parameters()) for net in (first, second)]
        first(next(batches(1))).mean().backward()
        pair[0].step()  # its gradients are left, and cleared by nobody
        for position, inputs in enumerate(batches(6)):
            loss = second(inputs).square().mean()
            (loss * float("inf") if position in (1, 2) else loss).backward()
            skipping(run, position in (1, 2), pair[1].step)
            pair[1].clear_grad()
        return weights(first), weights(second), [parameter.grad.tolist() for parameter in first.parameters()]

    plain, automated = both_ways(run, train)
    assert automated == plain


def test_gradients_of_a_skipped_step_that_are_stepped_with_uncleared_are_refused(scaling):
    first, second = network(), paddle.nn.Linear(1, 1)
    pair = [paddle.optimizer.SGD(0.1, parameters=net.parameters()) for net in (first, second)]
    (inputs,) = batches(1)
    (second(first(inputs).detach()).mean() * float("inf")).backward()
    pair[1].step()
    before = weights(second)
    second(first(inputs)).mean().backward()
    with pytest.raises(ampx.RunRefusedError, match=r"a skipped step left.*Call opt\.zero_grad"):
        pair[1].step()
    assert weights(second) == before


def test_the_script_reads_numbers_of_bfloat16_and_files_keep_it(run, tmp_path):
    """Plain Paddle hands NumPy the bits, as integers."""
    low = paddle.to_tensor([[1.5, -2.0]]).astype("bfloat16")
    low.stop_gradient = False
    assert low.numpy().dtype == np.uint16
    with automate(run):
        for numbers in (
            low.numpy(),
            np.asarray(low),
            np.array(low, "float64"),
            low.tolist(),
            (low * 1).detach().numpy(),
        ):
            assert np.array(numbers).tolist() == [[1.5, -2.0]]
        paddle.save({"low": low}, str(tmp_path / "file"))
        loaded = paddle.load(str(tmp_path / "file"))["low"]
        assert (loaded.dtype, loaded.tolist()) == (paddle.bfloat16, [[1.5, -2.0]])
    assert low.numpy().dtype == np.uint16


# -- refusals --------------------------------------------------------------------------------------------------------


def own_casting():
    paddle.amp.auto_cast()


def own_scaler():
    paddle.amp.GradScaler()


def own_decorate():
    paddle.amp.decorate(network(), level="O2")


@pytest.mark.parametrize("use", [own_casting, own_scaler, own_decorate])
def test_mixed_precision_of_the_scripts_own_is_refused(run, use):
    with (
        automate(run),
        pytest.raises(ampx.RunRefusedError, match=r"test_automatic\.py:\d+: the script uses paddle\.amp"),
    ):
        use()
    assert run.refusal is not None


@pytest.mark.parametrize("use", [own_casting, own_scaler])
def test_why_it_is_not_carried_out_is_said_where_that_was_asked_for(use):
    run = Run("paddle", RunSettings(level="O0", device="cpu", replace_native=True))
    with (
        automate(run),
        pytest.raises(ampx.RunRefusedError, match=r"--replace-native would .* Paddle's is not right: .*GradScaler\.$"),
    ):
        use()


def test_casting_that_is_switched_off_is_the_scripts_own_business(run):
    with automate(run), paddle.amp.auto_cast(enable=False):
        simple()
    assert run.recorder.steps == 8


def test_gradients_and_hooks_are_the_scripts_where_nothing_is_scaled(run):
    with automate(run):
        net = network()
        paddle.optimizer.SGD(0.1, parameters=net.parameters())
        (x,) = batches(1)
        x.stop_gradient = False
        seen = []
        net[0].weight.register_hook(seen.append)
        net(x).mean().backward()
        assert x.grad is not None
        assert len(seen) == 1


# -- the end ---------------------------------------------------------------------------------------------------------


def patched():
    return [
        paddle.optimizer.Optimizer.__init__,
        paddle.Tensor.backward,
        paddle.autograd.backward,
        AmpOptimizer.step,
        paddle.Tensor.grad,
        paddle.Tensor.grad_,
        paddle.Tensor.register_hook,
        paddle.autograd.py_layer.PyLayerBackward.backward,
        paddle.static.Print,
        paddle.amp.debugging.enable_tensor_checker,
        paddle.amp.auto_cast,
        paddle.amp.decorate,
        paddle.amp.GradScaler.__init__,
        paddle.static.amp.decorate,
        paddle.static.Executor.run,
    ]


def test_leaving_restores_every_patch_and_every_optimizer(run):
    before, finders = patched(), list(sys.meta_path)
    net = network()
    optimizers = []

    def script():
        optimizers.append(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
        net(next(batches(1))).mean().backward()
        optimizers[0].step()
        optimizers[0].clear_grad()
        assert all(now is not then for now, then in zip(patched(), before, strict=True))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), automate(run):
        script()
    assert patched() == before
    assert sys.meta_path == finders
    assert not {"step", "minimize", "clear_grad", "_ampx_managed"} & set(vars(optimizers[0]))
    weight = net[0].weight.tolist()
    net(next(batches(1))).mean().backward()
    optimizers[0].step()
    assert net[0].weight.tolist() != weight
    assert paddle.get_flags("FLAGS_low_precision_op_list") == {"FLAGS_low_precision_op_list": 0}


def test_who_looks_for_fluid_switches_nothing_and_a_library_does_not_see_it(tmp_path):
    pytest.importorskip("typer", reason="the command line is not installed")
    (folder := tmp_path / "site-packages").mkdir()
    (folder / "probing_library.py").write_text(
        "import importlib.util, paddle\n"
        "has = [importlib.util.find_spec('paddle.fluid') is not None]\n"
        "try:\n    import paddle.fluid\nexcept ImportError as error:\n    has.append(str(error))\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib.util, probing_library, paddle\n"
        "print(probing_library.has, importlib.util.find_spec('paddle.fluid') is not None, paddle.in_dynamic_mode())\n"
        "import paddle.fluid as fluid\n"
        "print(fluid.__name__, paddle.in_dynamic_mode())\n"
    )
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run_python("-m", "ampx", "run", script, check=True, PYTHONPATH=path)
    assert done.stdout.splitlines() == [
        "[False, \"No module named 'paddle.fluid'\"] True True",
        "ampx_fluid.fluid False",
    ]
