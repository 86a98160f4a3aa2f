"""The suites that an author subclasses."""

from __future__ import annotations

from .kit import (
    automation,
    casting,
    errors,
    lifecycle,
    loggers,
    numerics,
    orders,
    precision,
    reports,
    schedule,
    shipping,
    states,
    verbs,
    windows,
)


# pytest runs the last class first. So `pytest -x` tells an author what to write next: the verbs of what is declared,
# then the harness, then the verbs in the order in which a step calls them.
class BackendSuite(
    automation.AutomationTests,
    shipping.ConvertTests,
    precision.ReplayTests,
    precision.ForceTests,
    precision.WatchTests,
    loggers.LogTests,
    numerics.ClippingTests,
    schedule.ScheduleTests,
    windows.SkipTests,
    windows.AccumulationTests,
    windows.GroupTests,
    windows.PerLossTests,
    reports.ResultTests,
    reports.EventTests,
    states.StateTests,
    orders.OrderTests,
    errors.OptimizerErrorTests,
    errors.ProtocolErrorTests,
    errors.LossErrorTests,
    casting.CastTests,
    casting.RegionTests,
    lifecycle.SessionTests,
    lifecycle.CapabilityTests,
    lifecycle.LevelTests,
    numerics.NumericsTests,
    verbs.VerbTests,
):
    """Every test of a backend; subclass it as `TestBackend` and set `harness`."""
