"""Every dtype at every level on the harness's device: does casting, scaling, master weights and state work there?

What a test found out it puts on record with pytest's `record_property`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

import pytest

import ampx
from ampx.policy import Dtype, OptLevel
from ampx.session import Amp
from ampx.testing.base import KitTests
from ampx.testing.bench import Bench
from ampx.testing.checks import json_copy
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE
from evidence import COMBINATIONS

Record = Callable[[str, object], None]
LOW: Final = tuple(combination for combination in COMBINATIONS if combination[0] != "float32")
CONFIG: Final = ampx.LossScale(growth_interval=3)


class MatrixSuite(KitTests):
    """Tests of every combination; subclass it as `TestMatrix`.

    A combination that the backend refuses passes if what it declares says the same; the refusal goes on record.

    Attributes:
        harness: The harness's class.
    """

    def test_what_is_declared(self, record_property: Record) -> None:
        """What the backend declares goes on record."""
        can = self.backend.capabilities
        plain = {field.name: _plain(getattr(can, field.name)) for field in fields(can)}
        plain["offers"] = list(self.backend.offers)
        record_property("ampx.declared", [self.subject.framework, json_copy(plain)])

    @pytest.mark.parametrize(("dtype", "level"), LOW)
    def test_casting(self, dtype: Dtype, level: OptLevel, record_property: Record) -> None:
        """Operations (O1) or parameters (O2, O3) get the dtype."""
        amp = self._session(dtype, level, record_property)
        if amp is None:
            return
        if level == "O1":
            assert self.subject.computes_in() == dtype
        else:
            parameters = self._bench(amp).parameters
            assert {self.subject.dtype_of(parameter) for parameter in parameters} == {dtype}
        self._cover(record_property, amp, dtype, "casting")

    @pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
    def test_scaling(self, dtype: Dtype, level: OptLevel, record_property: Record) -> None:
        """The scale follows the reference trace; skipped steps change no parameter, and applied ones do."""
        amp = self._session(dtype, level, record_property)
        if amp is None:
            return
        bench = self._bench(amp)
        for overflow, expected in zip(REFERENCE_PATTERN, REFERENCE_TRACE, strict=True):
            before = bench.values()
            result = _train(bench, bool(overflow))
            assert (result.applied, result.next_scale) == (not overflow, expected)
            assert (bench.values() == before) == bool(overflow)
        self._cover(record_property, amp, dtype, "scaling")

    @pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
    def test_state(self, dtype: Dtype, level: OptLevel, record_property: Record) -> None:
        """Saved in the middle of the reference trace, and loaded into a fresh optimizer, the scale goes on."""
        amp = self._session(dtype, level, record_property)
        if amp is None:
            return
        first, cut = self._bench(amp), 5
        for overflow in REFERENCE_PATTERN[:cut]:
            _train(first, bool(overflow))
        state = json_copy(first.state_dict())
        amp = self.start(CONFIG, dtype=dtype, level=level)
        second = self._bench(amp)
        second.load(state)
        scales = [_train(second, bool(overflow)).next_scale for overflow in REFERENCE_PATTERN[cut:]]
        assert scales == list(REFERENCE_TRACE[cut:])
        self._cover(record_property, amp, dtype, "state")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_master_weights(self, dtype: Dtype, record_property: Record) -> None:
        """At O2, updates too small for a low-precision parameter add up in float32, and it follows."""
        amp = self._session(dtype, "O2", record_property)
        if amp is None:
            return
        bench = self._bench(amp)
        before = bench.values()
        for _ in range(128):
            assert _train(bench, False, 2.0**-12).applied
        for values, moved in zip(before, bench.values(), strict=True):
            for old, new in zip(values, moved, strict=True):
                # 128 steps at learning rate 0.5; a parameter below 2 is rounded by at most 2**-8 in bfloat16.
                assert abs(old - new - 128 * 0.5 * 2.0**-12) <= 2.0**-8
        self._cover(record_property, amp, dtype, "master weights")

    def _session(self, dtype: Dtype, level: OptLevel, record: Record) -> Amp | None:
        """Start a session where one is declared; elsewhere see the refusal, and give None."""
        device = self.backend.device(self.subject.device)
        can = self.backend.capabilities
        declared = level in can.levels and (dtype == "float32" or dtype in device.native | device.emulated)
        if not declared:
            with pytest.raises((ampx.UnsupportedByBackendError, ampx.UnsupportedDtypeError)) as caught:
                self.start(CONFIG, dtype=dtype, level=level)
            record("ampx.refused", [self.subject.framework, f"{device.name}/{dtype}/{level}", str(caught.value)])
            return None
        amp = self.start(CONFIG, dtype=dtype, level=level)
        assert (amp.effective.level, amp.effective.dtype) == (level, None if dtype == "float32" else dtype)
        return amp

    def _bench(self, amp: Amp) -> Bench:
        """Wrap an optimizer over parameters; at O2 and O3 over those of a prepared model."""
        if amp.effective.level in ("O0", "O1"):
            return self.bench(amp)
        return self.prepared(amp)

    def _cover(self, record: Record, amp: Amp, dtype: Dtype, aspect: str) -> None:
        device, level = amp.effective.device, amp.effective.level
        record("ampx.tested", [self.subject.framework, f"{device}/{dtype}/{level}/{aspect}"])


def _train(bench: Bench, overflow: bool, slope: float = 0.25) -> Any:
    """Step with the same derivative everywhere, or with one that is infinite."""
    slopes = [[slope] * len(values) for values in bench.values()]
    if overflow:
        slopes[-1][-1] = float("inf")
    return bench.train(slopes)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value
