"""Trains on two replicas, in this process or in one of two, and writes what it saw as JSON.

    distributed_worker.py FOLDER mirrored|workers

Started by test_distributed.py. The batch of each step has two rows, one for each replica; in the steps of PATTERN, one
replica's row is infinite.
"""

import importlib
import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import ampx

PATTERN = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
ROWS = ([0.5, 1.0, -0.25], [0.25, -1.0, 0.75])
# Learning rates by level: 1 minus the first times a slope is 1 in low precision.
RATES = {"O1": 2.0**-14, "O2": 2.0**-14, "O3": 0.25}


def make_strategy(kind):
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def batches(overflowing):
    """Return an array of shape (steps, replicas, features)."""
    data = np.array([ROWS] * len(PATTERN), "float32") * (1.0 + np.arange(len(PATTERN))[:, None, None] / 8)
    for step, overflow in enumerate(PATTERN):
        if overflow:
            data[step, overflowing] = np.inf
    return data.astype("float32")


class Record:
    """What is told after every step."""

    def __init__(self, strategy, model, opt, scale):
        self._strategy, self._model, self._opt, self._scale = strategy, model, opt, scale
        self.steps = []
        self._before = model.get_weights()

    def note(self):
        weights = self._model.get_weights()
        untouched = all(np.array_equal(old, new) for old, new in zip(self._before, weights, strict=True))
        self._before = weights
        copies = [float(copy) for copy in self._strategy.experimental_local_results(self._scale(self._opt))]
        result = self._opt.last_step
        self.steps.append([bool(result.applied), result.scale, result.next_scale, untouched, copies])

    def to_json(self):
        finite = all(bool(np.isfinite(weight).all()) for weight in self._model.get_weights())
        weights = np.concatenate([weight.ravel() for weight in self._model.get_weights()]).tolist()
        return {
            "steps": self.steps,
            "finite": finite,
            "weights": weights,
            "iterations": int(self._opt.iterations.numpy()),
        }


def custom_loop(strategy, keras, model, opt, data, record):
    @tf.function
    def step(rows):
        def replica_step(row):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(row) - 1.0)) / len(ROWS)
                with ampx.scale_loss(loss, opt) as scaled:
                    pass
            gradients = tape.gradient(scaled, model.trainable_variables)
            opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica_step, args=(rows,))

    for shares in data:
        rows = strategy.experimental_distribute_values_from_function(
            lambda context, shares=shares: tf.constant(shares[context.replica_id_in_sync_group][None])
        )
        step(rows)
        record.note()


def fit(strategy, keras, model, opt, data, record):
    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            record.note()

    rows = data.reshape(-1, data.shape[-1])
    dataset = tf.data.Dataset.from_tensor_slices((rows, np.ones((len(rows), 1), "float32"))).batch(len(ROWS))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model.fit(dataset.with_options(options), verbose=0, callbacks=[Watch()])


def train(strategy, keras_name, loop, overflowing):
    keras = importlib.import_module(keras_name)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        raw = keras.optimizers.SGD(0.125, momentum=0.5)
        opt = ampx.wrap_optimizer(raw, loss_scale=ampx.LossScale(growth_interval=3))
        model.compile(optimizer=opt, loss="mse")
    scales = {"keras": lambda opt: opt.dynamic_scale.value, "tf_keras": lambda opt: opt._loss_scale.current_loss_scale}
    record = Record(strategy, model, opt, scales[keras_name])
    {"custom": custom_loop, "fit": fit}[loop](strategy, keras, model, opt, batches(overflowing), record)
    return record.to_json()


def clip_and_embed(strategy):
    """Two steps of an embedding whose rows both replicas look up; the second overflows on the second replica."""
    import keras

    with strategy.scope():
        table = tf.Variable(tf.zeros([4, 1]))
        opt = ampx.wrap_optimizer(keras.optimizers.SGD(1.0), max_grad_norm=1.0)

    @tf.function
    def step(factors):
        def replica_step(factor):
            with tf.GradientTape() as tape:
                # Each replica gives (2, 1) to rows 0 and 2; their sum is (4, 2), of norm sqrt(20).
                loss = tf.reduce_sum(tf.gather(table, [0, 0, 2])) * factor
                with ampx.scale_loss(loss, opt) as scaled:
                    pass
            opt.apply_gradients([(tape.gradient(scaled, table), table)])

        strategy.run(replica_step, args=(factors,))

    seen = []
    for last in (1.0, np.inf):
        step(
            strategy.experimental_distribute_values_from_function(
                lambda context, last=last: tf.constant((1.0, last)[context.replica_id_in_sync_group], tf.float32)
            )
        )
        local = strategy.experimental_local_results(table)
        seen.append(
            [
                bool(opt.last_step.applied),
                opt.last_step.grad_norm,
                [variable.numpy().ravel().tolist() for variable in local],
            ]
        )
    return seen


def overflow_of_the_sum(strategy, keras_name):
    """Each replica's gradient is finite, their sum is not."""
    keras = importlib.import_module(keras_name)
    with strategy.scope():
        variable = tf.Variable(1.0)
        opt = ampx.wrap_optimizer(keras.optimizers.SGD(1.0), loss_scale=1.0)

    @tf.function
    def step():
        def replica_step():
            with tf.GradientTape() as tape, ampx.scale_loss(variable * 2e38, opt) as scaled:
                pass
            opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

        strategy.run(replica_step)

    step()
    return [bool(opt.last_step.applied), float(strategy.experimental_local_results(variable)[0])]


def outside_the_scope(strategy, keras_name):
    """Wrap before the scope: the replicas would share one variable and each move it."""
    keras = importlib.import_module(keras_name)
    opt = ampx.wrap_optimizer(keras.optimizers.SGD(1.0))
    with strategy.scope():
        variable = tf.Variable(1.0)

    def replica_step():
        with tf.GradientTape() as tape, ampx.scale_loss(variable * 1.0, opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

    try:
        strategy.run(replica_step)
    except ampx.ProtocolError as error:
        return [str(error), float(variable.numpy())]
    return ["not refused", float(variable.numpy())]


def metered(strategy):
    """Ask for the meter, which replicas refuse: none of them has the sum of the gradients."""
    import keras

    amp = ampx.init("tensorflow", level="O0", loss_scale="dynamic", nan_loss="skip")
    amp.meter_every = 1
    with strategy.scope():
        variable = tf.Variable(1.0)
        opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0))

    def replica_step():
        with tf.GradientTape() as tape, ampx.scale_loss(variable * 1.0, opt) as scaled:
            pass
        opt.apply_gradients([(tape.gradient(scaled, variable), variable)])

    try:
        tf.function(strategy.run)(replica_step)
    except ampx.UnsupportedByBackendError as error:
        return [str(error), float(variable.numpy())]
    return ["not refused", float(variable.numpy())]


def another_loss(strategy):
    """Scale a loss of another id than 0, for whose scale replicas make no variables."""
    import keras

    with strategy.scope():
        variable = tf.Variable(1.0)
        opt = ampx.wrap_optimizer(keras.optimizers.SGD(1.0))

    def replica_step():
        with ampx.scale_loss(variable * 1.0, opt, loss_id=1):
            pass

    try:
        tf.function(strategy.run)(replica_step)
    except ampx.UnsupportedByBackendError as error:
        return str(error)
    return "not refused"


def plain_fit(strategy):
    """Whether Keras itself can fit here, with nothing of ampx."""
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.125), loss="mse")
    try:
        model.fit(np.ones((2, 3), "float32"), np.ones((2, 1), "float32"), batch_size=2, verbose=0)
    except ValueError as error:
        return str(error)
    return "fits"


def at_level(strategy, dtype, level, overflowing):
    """Train at a level by updates that low-precision variables would lose, but for O3, where they keep them."""
    import keras

    amp = ampx.init("tensorflow", dtype=dtype, device="cpu", level=level, loss_scale="dynamic", nan_loss="skip")
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), layer])
        model, opt = amp.prepare(model, amp.wrap_optimizer(keras.optimizers.SGD(RATES[level])))

    @tf.function
    def step(rows):
        def replica_step(row):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(model(row), tf.float32)) / len(ROWS)
                with ampx.scale_loss(loss, opt) as scaled:
                    pass
            gradients = tape.gradient(scaled, model.trainable_variables)
            opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica_step, args=(rows,))

    applied = []
    for overflow in (0, 1, 0, 0):
        rows = np.array(ROWS, "float32")
        rows[overflowing] *= np.float32("inf") if overflow else 1
        shares = [tf.constant(row[None]) for row in rows]
        step(
            strategy.experimental_distribute_values_from_function(
                lambda context, shares=shares: shares[context.replica_id_in_sync_group]
            )
        )
        applied.append(bool(opt.last_step.applied))

    def copies(variable):
        local = strategy.experimental_local_results(variable.value)
        return [[copy.dtype.name, tf.cast(copy, tf.float32).numpy().ravel().tolist()] for copy in local]

    saved = np.asarray(model.get_weights()[0], "float32").ravel().tolist()
    masters = copies(layer.kernel.master) if level == "O2" else []
    return [model(np.ones((1, 3), "float32")).dtype.name, applied, copies(layer.kernel), masters, saved]


def main():
    folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    strategy = make_strategy(kind)
    ampx.init("tensorflow", level="O0", loss_scale="dynamic", nan_loss="skip")
    rank = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    results = {}

    def keep(name, value):
        results[name] = value
        (folder / f"{rank}.json").write_text(json.dumps(results))

    for keras_name in ("keras", "tf_keras"):
        for loop in ("custom", "fit"):
            if (kind, keras_name, loop) == ("workers", "keras", "fit"):
                continue
            for overflowing in range(len(ROWS)):
                keep(f"{keras_name} {loop} {overflowing}", train(strategy, keras_name, loop, overflowing))
        keep(f"sum {keras_name}", overflow_of_the_sum(strategy, keras_name))
        if kind == "mirrored":
            keep(f"outside {keras_name}", outside_the_scope(strategy, keras_name))
    keep("clip", clip_and_embed(strategy))
    if kind == "mirrored":
        keep("metered", metered(strategy))
        keep("another loss", another_loss(strategy))
    if kind == "workers":
        keep("plain fit", plain_fit(strategy))
    for dtype in ("float16", "bfloat16"):
        for level in RATES:
            for overflowing in range(len(ROWS)):
                name = f"{dtype} {level} {overflowing}"
                try:
                    keep(name, at_level(strategy, dtype, level, overflowing))
                except ampx.UnsupportedByBackendError as error:
                    keep(name, str(error))


if __name__ == "__main__":
    main()
