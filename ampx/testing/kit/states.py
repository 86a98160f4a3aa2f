"""A loss scale survives being saved, in whatever framework it is loaded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

import ampx
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, Bench, chosen
from ampx.testing.checks import json_copy, refused
from ampx.testing.foreign import FOREIGN
from ampx.testing.kit.orders import moved
from ampx.testing.oracle import Oracle

# Every field differs from its default.
UNUSUAL = ampx.LossScale(
    init_scale=96.0,
    growth_factor=3.0,
    backoff_factor=0.75,
    growth_interval=3,
    hysteresis=2,
    min_scale=5.0,
    max_scale=1000.0,
    max_consecutive_skips=40,
)
STATE = {"scale": 77.25, "growth_tracker": 2, "hysteresis_tracker": 1, "consecutive_skips": 5}
PATTERN = (1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1)


class StateTests(KitTests):
    """Saving and loading."""

    def test_every_field_survives_json(self) -> None:
        """Configuration and state at unusual values come back exactly, before and after the first step."""
        for steps in (0, 2):
            state = self._saved(UNUSUAL)
            bench = self.bench(self.start())
            bench.trace([0] * steps)
            bench.load(json_copy(state))
            assert bench.saved() == state["groups"][0]
            assert bench.scale == STATE["scale"]
            assert json_copy(bench.state_dict()) == {**state, "framework": self.subject.framework}

    def test_a_loaded_state_goes_on_as_it_would_have(self) -> None:
        """The trace after loading is the specification's from that state."""
        for steps in (0, 1):
            bench = self.bench(self.start())
            bench.trace([1] * steps)
            bench.load(json_copy(self._saved(UNUSUAL)))
            self._follows(bench, Oracle(asdict(UNUSUAL), STATE))

    def test_a_run_that_is_resumed_equals_one_that_is_not(self) -> None:
        """Saved after every step in turn, and loaded into new optimizers, the run ends the same."""
        config = ampx.LossScale(init_scale=64.0, growth_interval=2, hysteresis=2)
        expected = self.bench(self.start(config)).trace(PATTERN)
        saved, states = self.bench(self.start(config)), []
        for overflow, scale in zip(PATTERN, expected, strict=True):
            states.append(json_copy(saved.state_dict()))
            assert saved.trace([overflow]) == [scale]
        for cut, state in enumerate(states):
            resumed = self.bench(self.start(config))
            resumed.load(state)
            assert resumed.trace(PATTERN[cut:]) == expected[cut:]

    def test_states_of_other_libraries_are_taken_over(self) -> None:
        """apex, torch, Paddle, Keras, TensorFlow 1, flax and DeepSpeed: imported, loaded, and continued as there."""
        for library, (data, config, state) in FOREIGN.items():
            imported = json_copy(ampx.import_state(json_copy(data)))
            assert imported["framework"] == library
            bench = self.bench(self.start())
            bench.load(imported)
            assert bench.row() == state
            assert {name: bench.saved()["config"][name] for name in config} == config
            self._follows(bench, Oracle(bench.saved()["config"], state))

    @requires("optimizer objects")
    def test_the_state_covers_all_optimizers_in_order(self) -> None:
        """One entry a loss scale in order of wrapping; a list has one; one alone can be saved and loaded."""
        amp = self.start()
        a = self.bench(amp, loss_scale=ampx.LossScale(init_scale=2.0))
        b, c = self.group(amp)
        d = self.bench(amp, loss_scale=ampx.LossScale(init_scale=32.0))
        state = json_copy(amp.state_dict())
        assert [group["losses"][0]["scale"] for group in state["groups"]] == [2.0, 65536.0, 32.0]
        for position, group in enumerate(state["groups"]):
            group["losses"][0]["scale"] = 2.0**position
        amp.load_state_dict(state)
        assert [bench.scale for bench in (a, b, c, d)] == [1.0, 2.0, 2.0, 4.0]
        amp.load_state_dict(amp.state_dict(d.opt), a.opt)
        assert [bench.scale for bench in (a, b, c, d)] == [4.0, 2.0, 2.0, 4.0]

    def test_bad_states_change_nothing(self) -> None:
        """Each is refused by its own error, and parameters, optimizer state and scale stay as they were."""
        bench = self.bench(self.start(ampx.LossScale(growth_interval=3)), momentum=True)
        bench.trace((0, 1, 0))
        before, saved = bench.snapshot(), bench.saved()
        good = bench.state_dict()
        for error, passed, spoil in self._spoilers():
            bad = copy.deepcopy(good)
            bad = spoil(bad) or bad
            with refused(error, passed=passed, accepted="accepted: ", advice=""):
                bench.load(bad)
            assert bench.snapshot() == before
            assert bench.saved() == saved
        assert bench.trace((0, 0)) == [2.0**15, 2.0**16]

    @requires("optimizer objects")
    def test_a_wrong_number_of_scales_changes_nothing(self) -> None:
        """A state for two optimizers is not loaded into one, nor the other way round."""
        amp = self.start()
        a = self.bench(amp)
        first = amp.state_dict()
        b = self.bench(amp)
        first["groups"][0]["losses"][0]["scale"] = 2.0
        with refused(ampx.InvalidStateError, passed="holds 1 loss scales, and 2", accepted="as many", advice="Wrap"):
            amp.load_state_dict(first)
        two = amp.state_dict()
        with refused(ampx.InvalidStateError, passed="holds 2 loss scales, and 1", accepted="as many", advice="Wrap"):
            amp.load_state_dict(two, b.opt)
        assert (a.scale, b.scale) == (2.0**16, 2.0**16)

    def test_dynamic_and_static_are_not_mixed_up(self) -> None:
        """A state saved with a dynamic scale leaves a static one as it is, and says so; and the other way round."""
        static = self.bench(self.start(loss_scale=3.0))
        states = self._saved(UNUSUAL), static.state_dict()
        for scale, state in zip((7.0, ampx.LossScale(init_scale=7.0)), states, strict=True):
            bench = self.bench(self.start(loss_scale=scale))
            with pytest.warns(ampx.AmpxWarning, match="the current loss scale 7 stays"):
                bench.load(state)
            assert bench.scale == 7.0

    def test_a_static_scale_is_what_the_state_says(self) -> None:
        """Also where its configuration begins with 1, at which nothing is multiplied or divided."""
        state = json_copy(self.bench(self.start(loss_scale=8.0)).state_dict())
        state["groups"][0]["config"]["init_scale"] = 1.0
        bench = self.bench(self.start(loss_scale=1.0))
        bench.load(state)
        result = bench.train(FINITE)
        assert (result.applied, result.scale, bench.scale) == (True, 8.0, 8.0)
        assert bench.values() == moved(FINITE)
        assert not bench.train([[2.0**126] * len(slopes) for slopes in FINITE]).finite  # beyond float32 times 8

    def test_a_disabled_session_saves_and_loads_nothing(self) -> None:
        """Its state holds no scale; loading it elsewhere says so and changes nothing."""
        off = self.bench(self.start(enabled=False))
        state = json_copy(off.state_dict())
        assert state["groups"] == []
        off.load(self._saved(UNUSUAL))
        bench = self.bench(self.start())
        with pytest.warns(ampx.AmpxWarning, match="mixed precision disabled"):
            bench.load(state)
        assert bench.scale == 2.0**16

    def _saved(self, config: ampx.LossScale) -> dict[str, Any]:
        losses = [{"loss_id": 0, **STATE}]
        group = {"config": asdict(config), "losses": losses}
        return {"schema": "ampx.loss_scale/1", "framework": "another", "groups": [group]}

    def _follows(self, bench: Bench, oracle: Oracle) -> None:
        for overflow in PATTERN:
            result, after = bench.train(chosen(bool(overflow))), oracle.step(bool(overflow))
            assert (result.next_scale, bench.row()) == (after.scale, asdict(after))

    def _spoilers(self) -> list[tuple[type[Exception], str, Callable[[dict[str, Any]], Any]]]:
        def loss(name: str, value: object) -> Callable[[dict[str, Any]], Any]:
            return lambda state: state["groups"][0]["losses"][0].update({name: value})

        def config(name: str, value: object) -> Callable[[dict[str, Any]], Any]:
            return lambda state: state["groups"][0]["config"].update({name: value})

        unknown, invalid = ampx.UnknownSchemaError, ampx.InvalidStateError
        return [
            (unknown, "list", lambda state: [state]),
            (unknown, "the keys 'scale'", lambda state: {"scale": 1.0}),
            (unknown, "the schema 'ampx.loss_scale/99'", lambda state: {**state, "schema": "ampx.loss_scale/99"}),
            (invalid, "groups is None", lambda state: {"schema": state["schema"]}),
            (invalid, "groups[0].losses is []", lambda state: state["groups"][0].update(losses=[])),
            (invalid, "['consecutive_skips', ", self._without_scale),
            *((invalid, f".scale is {v!r}", loss("scale", v)) for v in (-1.0, 0.0, math.inf, "8", None, True)),
            (invalid, ".scale is nan", loss("scale", math.nan)),
            *((invalid, f".growth_tracker is {v!r}", loss("growth_tracker", v)) for v in (-1, 1.5, "1", 2**40)),
            (invalid, ".hysteresis_tracker is 'x'", loss("hysteresis_tracker", "x")),
            (invalid, ".consecutive_skips is -3", loss("consecutive_skips", -3)),
            (invalid, "growth_interval=0", config("growth_interval", 0)),
            (invalid, "backoff_factor=2.0", config("backoff_factor", 2.0)),
            (invalid, "max_scale=inf", config("max_scale", math.inf)),
            (invalid, "config is {", config("unknown_field", 1)),
        ]

    def _without_scale(self, state: dict[str, Any]) -> None:
        del state["groups"][0]["losses"][0]["scale"]
