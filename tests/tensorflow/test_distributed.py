"""MirroredStrategy on two logical CPUs, and MultiWorkerMirroredStrategy in two processes on this machine.

distributed_worker.py runs once for each; the tests judge what it wrote. What is right comes from the specification's
reference trace, and from plain Keras in one process on the whole batch: no ampx, no distribution, no scaling.
"""

import contextlib
import importlib
import json
import math
import pathlib
import socket

import numpy as np
import pytest
import tensorflow as tf

import processes
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE
from evidence import COMBINATIONS

pytest.importorskip("tf_keras", reason="tf_keras is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")
SECONDS = 400
KINDS = ["keras custom", "keras fit", "tf_keras custom", "tf_keras fit"]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def start(folder, kind, configurations):
    """Run one process for each value of TF_CONFIG; give a function that reads what they wrote under a name."""
    settings = [{} if value is None else {"TF_CONFIG": json.dumps(value)} for value in configurations]
    ranks = [processes.Started([WORKER, folder, kind], CUDA_VISIBLE_DEVICES="-1", **each) for each in settings]
    ended = processes.finish(ranks, SECONDS)  # what came before a hang still counts

    def read(name):
        results = []
        for rank in range(len(configurations)):
            path = folder / f"{rank}.json"
            seen = json.loads(path.read_text()) if path.exists() else {}
            assert name in seen, f"rank {rank} wrote nothing:\n{ended[rank].stderr[-3000:]}"
            results.append(seen[name])
        return results

    return read


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    return start(tmp_path_factory.mktemp("mirrored"), "mirrored", [None])


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    tasks = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}} for rank in range(2)]
    return start(tmp_path_factory.mktemp("workers"), "workers", tasks)


@pytest.fixture(scope="module")
def worker():
    """The module of the worker script, whose numbers the tests use."""
    specification = importlib.util.spec_from_file_location("distributed_worker", WORKER)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(worker):
    """The weights that plain Keras has after the steps that do not overflow, on both rows at once."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.125, momentum=0.5)
    for rows, overflow in zip(worker.batches(0), REFERENCE_PATTERN, strict=True):
        if not overflow:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(rows) - 1.0))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def judge(workers, plain):
    for worker in workers:
        assert [step[2] for step in worker["steps"]] == list(REFERENCE_TRACE)
        assert [step[1] for step in worker["steps"]] == [65536.0, *REFERENCE_TRACE[:-1]]
        assert [step[0] for step in worker["steps"]] == [not overflow for overflow in REFERENCE_PATTERN]
        assert [step[3] for step in worker["steps"]] == [bool(overflow) for overflow in REFERENCE_PATTERN]  # untouched
        assert [set(step[4]) for step in worker["steps"]] == [{step[2]} for step in worker["steps"]]  # on every replica
        assert worker["iterations"] == REFERENCE_PATTERN.count(0)
        assert worker["finite"]
        # Sums of two rows in another order, eleven steps long.
        np.testing.assert_allclose(worker["weights"], plain, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_on_one_replica_makes_all_skip(mirrored, plain, kind, overflowing, covers):
    judge(mirrored(f"{kind} {overflowing}"), plain)
    covers("distributed", "tensorflow", "cpu/float32/O0")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "keras fit"])
@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_in_one_worker_makes_both_skip(workers, plain, kind, overflowing, covers):
    judge(workers(f"{kind} {overflowing}"), plain)
    covers("distributed", "tensorflow", "cpu/float32/O0")


def test_keras_3_itself_cannot_fit_on_several_workers(workers):
    """Should it learn to, this fails, and the worker script has to fit through ampx too."""
    for message in workers("plain fit"):
        assert "unsupported type" in message


@pytest.mark.parametrize("strategy", ["mirrored", "workers"])
def test_clipping_takes_the_norm_of_all_replicas(request, strategy):
    """Sparse gradients: rows 0 and 2 of the sum are (4, 2), which is clipped to the length 1."""
    moved = [-4 / math.sqrt(20), 0.0, -2 / math.sqrt(20), 0.0]
    for (applied, norm, tables), (skipped, none, after) in request.getfixturevalue(strategy)("clip"):
        assert (applied, skipped, none) == (True, False, None)
        assert math.isclose(norm, math.sqrt(20), rel_tol=1e-6)
        for table in tables:
            np.testing.assert_allclose(table, moved, rtol=1e-6)
        assert after == tables


@pytest.mark.parametrize("strategy", ["mirrored", "workers"])
@pytest.mark.parametrize("keras_name", ["keras", "tf_keras"])
def test_a_sum_that_overflows_is_skipped(request, strategy, keras_name):
    for applied, weight in request.getfixturevalue(strategy)(f"sum {keras_name}"):
        assert (applied, weight) == (False, 1.0)


@pytest.mark.parametrize("keras_name", ["keras", "tf_keras"])
def test_wrapping_outside_the_scope_is_refused(mirrored, keras_name):
    for message, weight in mirrored(f"outside {keras_name}"):
        assert "strategy.scope()" in message
        assert weight == 1.0


def test_a_meter_that_was_asked_for_is_refused_on_several_replicas(mirrored):
    ((message, weight),) = mirrored("metered")
    assert "amp.meter_every is 1" in message
    assert weight == 1.0


def test_losses_with_scales_of_their_own_are_refused_on_several_replicas(mirrored):
    (message,) = mirrored("another loss")
    assert "loss_id=1 on several replicas" in message


FOLDS = """
import json
import keras
import tensorflow as tf
import ampx

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
kept, seen = [], []
for fold in range(3):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        if fold == 2:
            ampx.shutdown()
        amp = ampx.init("tensorflow", level="O0", loss_scale="dynamic")
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = amp.wrap_optimizer(keras.optimizers.SGD(0.125))
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(tf.ones((8, 3)), tf.ones((8, 1)), batch_size=4, verbose=0)
    kept.append((model, optimizer))
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        amp.load_state_dict(amp.state_dict())
    seen.append([float(weight.sum()) for weight in model.get_weights()])
    seen[-1] += [len(kept), optimizer.loss_scale, bool(optimizer.last_step.applied), kept[0][1].loss_scale]
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    ampx.shutdown()
print(json.dumps(seen))
"""


def test_a_session_is_replaced_and_ended_in_the_scope_of_another_strategy():
    """A notebook's cell that runs twice, and folds: each makes a strategy; an earlier fold's optimizer goes on."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(0.125), loss="mse")
    model.fit(tf.ones((8, 3)), tf.ones((8, 1)), batch_size=4, verbose=0)
    plain = [float(weight.sum()) for weight in model.get_weights()]
    for fold, (*weights, kept, scale, applied, first) in enumerate(processes.last_json("-c", FOLDS), 1):
        np.testing.assert_allclose(weights, plain, rtol=1e-6)
        assert (kept, scale, applied, first) == (fold, 65536.0, True, 65536.0)


LEVELS = [(strategy, dtype, level) for strategy in ("mirrored", "workers") for dtype, level in COMBINATIONS[1:]]
# TensorFlow cannot send bfloat16 variables to other workers.
REFUSED = [("workers", "bfloat16", "O2"), ("workers", "bfloat16", "O3")]


@pytest.mark.parametrize(("strategy", "dtype", "level"), [each for each in LEVELS if each not in REFUSED])
@pytest.mark.parametrize("overflowing", [0, 1])
def test_replicas_train_alike_at_every_level(request, worker, strategy, dtype, level, overflowing, covers):
    """Three steps of the mean of the rows, which are (0.5, 1, -0.25) and (0.25, -1, 0.75), and a skipped one."""
    expected = [1 - 3 * worker.RATES[level] * slope for slope in (0.375, 0.0, 0.25)]
    for computed, applied, kernels, masters, saved in request.getfixturevalue(strategy)(
        f"{dtype} {level} {overflowing}"
    ):
        assert computed == dtype
        assert applied == [True, False, True, True]
        assert saved == expected
        held = {"O1": ["float32", expected], "O2": [dtype, [1.0, 1.0, 1.0]], "O3": [dtype, expected]}[level]
        assert kernels == [held] * len(kernels)
        assert masters == ([["float32", expected]] * len(kernels) if level == "O2" else [])
    covers("distributed", "tensorflow", f"cpu/{dtype}/{level}")


@pytest.mark.parametrize(("strategy", "dtype", "level"), REFUSED)
def test_variables_are_refused_that_tensorflow_cannot_send_to_other_workers(request, strategy, dtype, level):
    for message in request.getfixturevalue(strategy)(f"{dtype} {level} 0"):
        assert "MultiWorkerMirroredStrategy" in message
