"""`LossScaleMonitor`: what `History`, `CSVLogger` and `TensorBoard` show of the loss scale, and when training ends."""

import csv

import keras
import numpy as np
import pytest

import ampx
from ampx_tensorflow.callbacks import LossScaleMonitor

BATCHES = 4
OPTIONS = {
    "function": {},
    "eager": {"run_eagerly": True},
    "several steps": {"steps_per_execution": 2},
}


def model_of(opt, **options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float32")])
    model.compile(opt, "mse", **options)
    return model


def data(*bad):
    """Inputs of four batches; those that are named hold inf."""
    inputs = np.full((2 * BATCHES, 3), 0.5, "float32")
    for batch in bad:
        inputs[2 * batch] = np.inf
    return inputs, np.ones((2 * BATCHES, 1), "float32")


def fit(model, inputs, targets, callbacks, epochs=1):
    return model.fit(inputs, targets, batch_size=2, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_history_and_files_have_the_scale_and_the_skips_of_every_epoch(amp, tmp_path, options):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=ampx.LossScale(init_scale=64.0, growth_interval=6))
    model, monitor, path = model_of(opt, **options), LossScaleMonitor(), tmp_path / "log.csv"
    bad, good = data(1, 2), data()
    # Twice a good step, two skips and a good one; then 1 + 4 + 1 good steps, and the scale grows in the fourth epoch.
    first = fit(model, *bad, [monitor, keras.callbacks.CSVLogger(path)], epochs=2)
    then = fit(model, *good, [monitor], epochs=2)
    assert {name: first.history[name] for name in ("loss_scale", "skipped_steps", "skipped_share")} == {
        "loss_scale": [16.0, 4.0],
        "skipped_steps": [2, 2],
        "skipped_share": [0.5, 0.5],
    }
    assert (then.history["loss_scale"], then.history["skipped_steps"]) == ([4.0, 8.0], [0, 0])
    assert then.history["scale_collapses"] == [0, 0]
    with path.open() as file:
        rows = [(float(row["loss_scale"]), float(row["skipped_share"])) for row in csv.DictReader(file)]
    assert rows == [(16.0, 0.5), (4.0, 0.5)]


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["function", "eager"])
@pytest.mark.filterwarnings("ignore::ampx.errors.ScaleCollapsedWarning")
def test_a_collapse_ends_training_where_that_is_asked_for(amp, options):
    config = ampx.LossScale(init_scale=64.0, max_consecutive_skips=3)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=config)
    model, monitor = model_of(opt, **options), LossScaleMonitor(stop_on_collapse=True)
    history = fit(model, *data(*range(BATCHES)), [monitor], epochs=5)
    assert history.history["scale_collapses"] == [1]  # one epoch of five
    assert monitor.collapse.step == 3
    goes_on = LossScaleMonitor()
    assert fit(model, *data(), [goes_on], epochs=2).history["scale_collapses"] == [0, 0]
    assert goes_on.collapse is None


@pytest.mark.filterwarnings("ignore::ampx.errors.ScaleCollapsedWarning")
def test_eager_training_ends_with_the_step_that_collapses(amp):
    config = ampx.LossScale(max_consecutive_skips=2)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=config)
    model = model_of(opt, run_eagerly=True)
    fit(model, *data(*range(BATCHES)), [LossScaleMonitor(stop_on_collapse=True)])
    assert opt.last_step.consecutive_skips == 2


@pytest.mark.filterwarnings("ignore::ampx.errors.ScaleCollapsedWarning")
def test_a_collapse_of_another_model_is_not_told(amp):
    config = ampx.LossScale(max_consecutive_skips=1)
    other = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=config)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01), loss_scale=config)
    failing, model, monitor = model_of(other, run_eagerly=True), model_of(opt), LossScaleMonitor(stop_on_collapse=True)

    class FitsAnother(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            fit(failing, *data(0), [])

    fit(model, *data(), [monitor, FitsAnother()])
    assert monitor.collapse is None
    assert opt.ampx_group.steps == BATCHES


def test_it_stops_listening_with_the_training_and_after_an_exception(amp):
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01))
    model, monitor = model_of(opt), LossScaleMonitor()

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyError("callback")

    with pytest.raises(KeyError):
        fit(model, *data(), [monitor, Fails()])
    fit(model, *data(), [monitor])
    assert not amp._listeners


def test_a_raw_optimizer_is_refused(amp):
    with pytest.raises(ampx.NotWrappedError, match=r"compiled with SGD.*ampx.wrap_optimizer"):
        fit(model_of(keras.optimizers.SGD(0.01)), *data(), [LossScaleMonitor()])


def test_a_session_that_is_over_is_told(amp):
    model = model_of(amp.wrap_optimizer(keras.optimizers.SGD(0.01)))
    amp.shutdown()
    with pytest.raises(ampx.NotInitializedError, match="on_event"):
        fit(model, *data(), [LossScaleMonitor()])
