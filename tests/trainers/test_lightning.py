"""Lightning's Trainer and Fabric with ampx's precision plugins, and what their own does wrong.

The oracle is arithmetic: a parameter's gradient is what the batch says, loss scales are powers of two.
"""

import importlib

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision as NativeFabricPrecision
from lightning.pytorch.plugins.precision import MixedPrecision as NativePrecision

import ampx
from ampx.errors import NotWrappedError, ProtocolError, StateError, UnsupportedByBackendError
from ampx_torch.trainers.lightning import AmpxFabricPrecision, AmpxPrecision

INF = float("inf")
RATE = 0.25
BOTH = pytest.mark.parametrize("plugin", ["native", "ampx"])


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def precision_of(plugin, amp, native, ours):
    return native("16-mixed", "cpu", scaler()) if plugin == "native" else ours(amp)


def batches(*slopes):
    return torch.utils.data.DataLoader(torch.tensor(slopes), batch_size=1)


def trainer_of(plugin, folder, **options):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[plugin],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"max_epochs": 1, **options},
    )


class Slope(lightning.LightningModule):
    """The gradient of its parameter is what the batch says."""

    def __init__(self, make=torch.optim.SGD, **options):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.make = lambda parameters: make(parameters, lr=RATE, **options)
        self.dtypes, self.seen, self.rates = [], [], []

    def training_step(self, batch, index):
        self.dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return (self.w * batch).sum()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.w.grad.item())

    def configure_optimizers(self):
        optimizer = self.make([self.w])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class Constant(Slope):
    def configure_optimizers(self):
        return self.make([self.w])


class Two(lightning.LightningModule):
    """Both losses backward, then both optimizers step."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))

    def training_step(self, batch, index):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward((self.a * batch).sum())
        self.manual_backward(self.b * 1.0)
        first.step()
        second.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([self.a], lr=RATE), torch.optim.SGD([self.b], lr=RATE)]


@BOTH
def test_the_second_optimizer_is_not_divided_by_another_scale_when_the_first_overflows(plugin, amp, tmp_path):
    model = Two()
    trainer_of(precision_of(plugin, amp, NativePrecision, AmpxPrecision), tmp_path).fit(model, batches(INF))
    assert model.a.item() == 0.0
    wrong = 2.0 if plugin == "native" else 1.0  # Lightning's own divides by the scale that the first has halved
    assert model.b.item() == -RATE * wrong


@BOTH
def test_a_scheduler_of_steps_waits_for_a_skipped_one(plugin, amp, tmp_path):
    model = Slope()
    trainer_of(precision_of(plugin, amp, NativePrecision, AmpxPrecision), tmp_path).fit(model, batches(1.0, INF, 1.0))
    waits, moves = [0.125, 0.125, 0.0625], [0.125, 0.0625, 0.03125]
    assert model.rates == (moves if plugin == "native" else waits)
    # The third update is at the rate that the second batch left.
    assert model.w.item() == -(0.25 + model.rates[1])
    assert set(model.dtypes) == {torch.float16}


def test_a_scheduler_of_epochs_does_not_wait(amp, tmp_path):
    class Epochs(Slope):
        def configure_optimizers(self):
            optimizer = self.make([self.w])
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    model = Epochs()
    trainer = trainer_of(AmpxPrecision(amp), tmp_path, max_epochs=2)
    trainer.fit(model, batches(1.0, INF))
    assert trainer.optimizers[0].param_groups[0]["lr"] == RATE / 4


def test_windows_of_several_batches_are_clipped_as_true_gradients_and_dropped_where_one_overflows(amp, tmp_path):
    model, plugin = Constant(), AmpxPrecision(amp)
    trainer = trainer_of(plugin, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(model, batches(1.0, 2.0, INF, 1.0, 0.25, 0.25))
    assert model.seen == [1.5, INF, 0.25]  # hooks see true gradients, before clipping
    assert model.w.item() == pytest.approx(-RATE * (0.5 + 0.25), rel=1e-5)  # clip_grad_norm_ adds 1e-6 to the norm
    assert trainer.global_step == 3
    step = plugin.wrapped(trainer.optimizers[0]).last_step
    assert (step.applied, step.scale, plugin.scaler.get_scale()) == (True, 512.0, 512.0)


@BOTH
def test_fused_optimizers_are_clipped(plugin, amp, tmp_path):
    model = Constant(torch.optim.SGD, fused=True)
    trainer = trainer_of(precision_of(plugin, amp, NativePrecision, AmpxPrecision), tmp_path, gradient_clip_val=0.5)
    if plugin == "native":
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer.fit(model, batches(1.0))
    else:
        trainer.fit(model, batches(1.0, INF))
        assert model.w.item() == pytest.approx(-RATE * 0.5, rel=1e-5)


def test_a_run_that_is_resumed_ends_as_one_that_was_not_interrupted(amp, tmp_path):
    slopes = [1.0, INF, 1.0, 2.0, 1.0, INF, 1.0, 1.0]

    class Scripted(Slope):
        def training_step(self, batch, index):
            return super().training_step(slopes[self.global_step], index)  # Lightning counts skipped steps, too

    def fit(steps, **options):
        model, plugin = Scripted(torch.optim.SGD, momentum=0.5), AmpxPrecision(amp)
        trainer = trainer_of(plugin, tmp_path, max_epochs=-1, max_steps=steps)
        trainer.fit(model, batches(0.0), **options)
        return trainer, (model.w.item(), plugin.state_dict(), trainer.optimizers[0].param_groups[0]["lr"])

    def finish(cut):
        if not cut:
            return fit(len(slopes))[1]
        fit(3)[0].save_checkpoint(tmp_path / "cut.ckpt")
        return fit(len(slopes), ckpt_path=tmp_path / "cut.ckpt", weights_only=False)[1]

    whole = finish(cut=False)
    assert finish(cut=True) == whole
    # By the specification: 1024, halved twice, doubled after each two finite steps in a row.
    (loss,) = whole[1]["groups"][0]["losses"]
    assert (loss["scale"], loss["growth_tracker"]) == (1024.0, 0)


def test_a_training_step_that_returns_nothing_skips_the_batch(amp, tmp_path):
    class Skips(Constant):
        def training_step(self, batch, index):
            return None if index == 1 else super().training_step(batch, index)

    model, plugin = Skips(), AmpxPrecision(amp)
    trainer_of(plugin, tmp_path).fit(model, batches(1.0, 1.0, 1.0))
    assert model.w.item() == -RATE * 2
    assert plugin.state_dict()["groups"][0]["losses"][0]["scale"] == 2048.0  # two finite steps


def test_an_optimizer_that_evaluates_its_closure_several_times_is_refused(amp, tmp_path):
    with pytest.raises(UnsupportedByBackendError, match="LBFGS"):
        trainer_of(AmpxPrecision(amp), tmp_path).fit(Constant(torch.optim.LBFGS), batches(1.0))


def test_a_disabled_session_trains_in_float32_with_the_plugin(tmp_path):
    amp = ampx.init("torch", enabled=False)
    model, plugin = Slope(), AmpxPrecision(amp)
    trainer_of(plugin, tmp_path, gradient_clip_val=0.5).fit(model, batches(1.0, 1.0))
    assert set(model.dtypes) == {torch.float32}
    assert model.w.item() == pytest.approx(-0.5 * (0.25 + 0.125), rel=1e-5)
    assert plugin.precision == "32-true"


# -- Fabric ----------------------------------------------------------------------------------------


def fabric_of(plugin):
    return Fabric(accelerator="cpu", devices=1, plugins=[plugin])


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.dtype = None

    def forward(self, slope):
        self.dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return self.w * slope


def prepared(plugin, fabric):
    model = Weights()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=RATE))
    if isinstance(plugin, AmpxFabricPrecision):
        plugin.manage(optimizer)
    return model, optimizer


@BOTH
def test_fabrics_second_optimizer_is_not_divided_by_another_scale_when_the_first_overflows(plugin, amp):
    precision = precision_of(plugin, amp, NativeFabricPrecision, AmpxFabricPrecision)
    fabric = fabric_of(precision)
    (first, first_optimizer), (second, second_optimizer) = (prepared(precision, fabric) for _ in range(2))
    fabric.backward(first(INF))
    fabric.backward(second(1.0))
    first_optimizer.step()
    second_optimizer.step()
    assert first.w.item() == 0.0
    assert second.w.item() == -RATE * (2.0 if plugin == "native" else 1.0)


def test_fabric_accumulates_clips_and_drops_a_window_that_overflows(amp):
    precision = AmpxFabricPrecision(amp)
    fabric = fabric_of(precision)
    model, optimizer = prepared(precision, fabric)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    gated = ampx.gate(scheduler, precision.wrapped(optimizer))
    norms, rates = [], []
    for window in ((1.0, 2.0), (INF, 1.0), (0.25, 0.0)):
        for slope in window:
            fabric.backward(model(slope) / 2)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False).item())
        optimizer.step()
        gated.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert norms == [1.5, INF, 0.125]
    assert rates == [0.125, 0.125, 0.0625]
    assert model.w.item() == pytest.approx(-(0.25 * 0.5 + 0.125 * 0.125), rel=1e-5)
    assert model.module.dtype == torch.float16


@BOTH
def test_fabric_saves_the_loss_scale_where_the_session_is_saved(plugin, amp, tmp_path):
    def start():
        precision = precision_of(plugin, amp, NativeFabricPrecision, AmpxFabricPrecision)
        fabric = fabric_of(precision)
        return precision, fabric, *prepared(precision, fabric)

    precision, fabric, model, optimizer = start()
    fabric.backward(model(INF))
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    if plugin == "ampx":
        state["scale"] = precision
    fabric.save(tmp_path / "fabric.ckpt", state)
    assert precision.scaler.get_scale() == 512.0
    precision, fabric, model, optimizer = start()
    fabric.load(
        tmp_path / "fabric.ckpt",
        {"model": model, "optimizer": optimizer, **({"scale": precision} if plugin == "ampx" else {})},
    )
    # Fabric's own plugin is asked for its state by nobody.
    assert precision.scaler.get_scale() == (1024.0 if plugin == "native" else 512.0)


def test_a_native_checkpoint_of_the_scaler_is_taken_over(amp):
    precision = AmpxFabricPrecision(amp)
    prepared(precision, fabric_of(precision))
    native = scaler()
    native.scale(torch.ones(()))
    native.update(256.0)
    precision.load_state_dict(native.state_dict())
    assert precision.scaler.get_scale() == 256.0


def test_an_optimizer_that_was_not_told_of_is_an_error_and_not_a_wrong_step(amp):
    precision = AmpxFabricPrecision(amp)
    fabric = fabric_of(precision)
    model = Weights()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with pytest.raises(ProtocolError, match="manage"):
        fabric.backward(model(1.0))
    with pytest.raises(NotWrappedError, match="manage"):
        optimizer.step()
    precision.manage(optimizer)
    with pytest.raises(StateError, match="1 optimizers"):
        precision.load_state_dict({**precision.state_dict(), "groups": []})
    with pytest.raises(ProtocolError, match="new_scale"):
        precision.scaler.update(2.0)


def test_what_fabric_returns_stands_for_an_optimizer_that_was_wrapped_before(amp):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = Weights()
    model, optimizer = fabric.setup(model, ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=RATE)))
    for slope, written in ((1.0, INF), (1.0, 1.0)):
        with ampx.scale_loss(model(slope), optimizer) as scaled:
            fabric.backward(scaled)
        ampx.unscale(optimizer)
        model.w.grad.fill_(written)
        optimizer.step()
        optimizer.zero_grad()
    assert model.w.item() == -RATE
    assert optimizer.last_step.scale == 512.0


TWINS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@pytest.mark.parametrize("package", TWINS)
def test_either_package_of_lightning_trains_by_the_plugins_for_it_and_is_told_of_the_others(package, amp, tmp_path):
    ours = importlib.import_module(f"ampx_torch.trainers.{package}")
    trainers, fabrics = importlib.import_module(package), importlib.import_module(TWINS[package])

    class Module(trainers.LightningModule):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, index):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
            return (self.w * batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD([self.w], lr=RATE)

    options = {"accelerator": "cpu", "devices": 1}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def trainer(plugin):
        return trainers.Trainer(
            **options, **quiet, plugins=[plugin], max_epochs=1, gradient_clip_val=1.0, default_root_dir=tmp_path
        )

    model, plugin = Module(), ours.AmpxPrecision(amp)
    trainer(plugin).fit(model, batches(INF, 4.0))
    assert model.w.item() == pytest.approx(
        -RATE, rel=1e-6
    )  # clipped from 4, where a Trainer does that for modules of its own package only
    assert plugin.scaler.get_scale() == 512.0

    weight = torch.nn.Parameter(torch.zeros(()))
    plugin = ours.AmpxFabricPrecision(amp)
    fabric = fabrics.Fabric(**options, plugins=[plugin])
    optimizer = fabric.setup_optimizers(torch.optim.SGD([weight], lr=RATE))
    plugin.manage(optimizer)
    fabric.backward(weight * 4.0)
    optimizer.step()
    assert weight.item() == -4 * RATE

    (other,) = TWINS.keys() - {package}
    theirs = importlib.import_module(f"ampx_torch.trainers.{other}")
    for make in (
        lambda: trainer(theirs.AmpxPrecision(amp)),
        lambda: fabrics.Fabric(**options, plugins=[theirs.AmpxFabricPrecision(amp)]),
    ):
        with pytest.raises(Exception, match=rf"ampx_torch\.trainers\.{package} has the one for \w"):
            make()
