"""Every hundredth step is metered where it updates; samples are of a pretended parameter, so that all is known."""

import types

import numpy as np
import pytest

from ampx.events import PrecisionLost
from ampx.formats import FORMATS
from ampx.numerics.host_meter import HostMeter, Sampled, Update

SCALE = 1024.0


class Training:
    """One parameter, that every step moves by the same."""

    def __init__(self, gradient, moves, stage="scaled", factors=(SCALE,), enabled=True, applied=True):
        self.values, self.looks, self.events = np.float32([1.0, 1.0, 1.0, 1.0]), 0, []
        self.gradient, self.moves = gradient, np.float32(moves)
        state = types.SimpleNamespace(scale=SCALE, consecutive_skips=0)
        group = types.SimpleNamespace(
            enabled=enabled,
            framework="toy",
            index=1,
            states={0: state},
            send=self.events.append,
            meter_every=100,
            observer=None,
        )
        self.member = types.SimpleNamespace(
            group=group,
            stage=stage,
            factors=dict(enumerate(factors)),
            factor=factors[0],
        )
        self.ampx_member, self.applied = self.member, applied
        self.meter = HostMeter("float16", self.look)

    def look(self, optimizer, gradients):
        self.looks += 1
        return [Sampled("weight", "float32", self.values.copy(), self.gradient if gradients else None)]

    def train(self, steps):
        for _ in range(steps):
            looks_again = self.meter.before(self)
            self.values = self.values - self.moves
            if looks_again:
                self.meter.after(self, {0: self.applied})
        return self.meter.last()


def test_the_hundredth_step_is_metered_and_no_other():
    training = Training(np.float32([1.0, 2.0, 4.0, 0.0]), [0.0, 0.25, 0.25, 0.0])
    assert training.train(99) is None
    assert training.looks == 0
    meter = training.train(1)
    entry = meter.parameters[0]
    assert (meter.step, meter.dtype, meter.scale) == (100, "float16", SCALE)
    assert (entry.name, entry.sampled, entry.moved, entry.unchanged, entry.flushed) == ("weight", 4, 3, 1, 0)
    assert training.train(99) is meter
    assert training.looks == 2  # before and after
    assert training.events == []  # a third is less than a half


@pytest.mark.parametrize(
    ("gradient", "moves", "lost", "flushed"),
    [([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.5, 0.5], 0.5, 0.0), ([2.0**-26, 1.0, 1.0, 1.0], [0.5] * 4, 0.0, 0.25)],
)
def test_precision_that_is_lost_is_an_event(gradient, moves, lost, flushed):
    training = Training(np.float32(gradient), moves)
    meter = training.train(100)
    assert (meter.lost, meter.flushed) == (lost, flushed)
    assert training.events == [PrecisionLost("toy", 1, 0, 100, SCALE, SCALE, 0, lost, flushed)]


def test_somebody_who_logs_hears_of_every_update_that_was_metered():
    training = Training(np.float32([1.0, 2.0, 4.0, 0.0]), [0.0, 0.25, 0.25, 0.0])
    training.member.group.observer = object()
    training.train(200)
    lost, headroom = 1 / 3, np.log2(65504.0 / 4.0)
    assert [type(event).__name__ for event in training.events] == ["UpdateMetered"] * 2
    assert [(event.step, event.lost, event.flushed) for event in training.events] == [
        (100, lost, 0.0),
        (200, lost, 0.0),
    ]
    assert [event.headroom for event in training.events] == pytest.approx([headroom] * 2)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_what_is_reported_is_what_the_parameters_add_up_to(compute):
    generator = np.random.default_rng(0)
    form = FORMATS[compute]
    edges = [
        form.flushes_to,
        np.nextafter(np.float32(form.flushes_to), np.float32(1)),
        0.0,
        np.inf,
        np.nan,
        form.largest,
    ]
    before, after = [], []
    for number in range(50):
        size = int(generator.integers(0, 40))
        values = generator.standard_normal(size, np.float32)
        moved = np.where(generator.random(size) < 0.5, values, values + 1)
        gradient = generator.standard_normal(size, np.float32) * np.float32(2.0) ** generator.integers(-140, 20, size)
        gradient = np.where(generator.random(size) < 0.2, generator.choice(edges, size), gradient).astype(np.float32)
        before.append(Sampled(f"{number}", "float32", values, None if number % 7 == 0 else gradient))
        after.append(Sampled(f"{number}", "float32", moved, None))
    update = Update(100, compute, SCALE, 1.0, before, after)
    meter = update.meter({})
    assert 0 < meter.lost < 1
    assert 0 < meter.flushed < 1
    total = update.total()
    assert (total.lost, total.flushed_share) == (meter.lost, meter.flushed)
    assert total.headroom == pytest.approx(meter.headroom)


@pytest.mark.parametrize(("stage", "flushed"), [("scaled", 4), ("unscaled", 0)])
def test_gradients_that_were_divided_are_metered_as_the_loss_scale_made_them(stage, flushed):
    training = Training(np.float32([2.0**-30] * 4), [0.5] * 4, stage)  # times 2**10 it is beyond what flushes
    assert training.train(100).parameters[0].flushed == flushed


def test_with_several_loss_scales_gradients_are_metered_as_they_are():
    training = Training(np.float32([2.0**-30] * 4), [0.5] * 4, "unscaled", (SCALE, 2.0))
    meter = training.train(100)
    assert (meter.scale, meter.parameters[0].flushed) == (1.0, 4)


def test_a_parameter_without_a_gradient_has_no_headroom():
    entry = Training(None, [0.0] * 4).train(100).parameters[0]
    assert (entry.moved, entry.headroom) == (0, None)


@pytest.mark.parametrize("options", [{"enabled": False}, {"stage": "idle"}, {"applied": False}])
def test_a_step_that_does_not_update_by_scaled_gradients_is_not_metered(options):
    assert Training(np.float32([1.0] * 4), [0.0] * 4, **options).train(100) is None
