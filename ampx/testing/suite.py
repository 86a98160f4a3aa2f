"""The suites that an author subclasses."""

from __future__ import annotations

from .kit import casting, errors, lifecycle, numerics, reports, schedule, states, windows


class BackendSuite(
    numerics.NumericsTests,
    numerics.ClippingTests,
    schedule.ScheduleTests,
    windows.SkipTests,
    windows.AccumulationTests,
    windows.GroupTests,
    windows.PerLossTests,
    reports.ResultTests,
    reports.EventTests,
    states.StateTests,
    errors.OptimizerErrorTests,
    errors.ProtocolErrorTests,
    errors.LossErrorTests,
    casting.CastTests,
    casting.RegionTests,
    lifecycle.SessionTests,
    lifecycle.CapabilityTests,
):
    """Every test of a backend; subclass it as `TestBackend` and set `harness`."""
