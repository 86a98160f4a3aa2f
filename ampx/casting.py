"""The casting half of a session."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from . import annotate
from .backend import Backend
from .contract import CastPlan
from .effective import Effective
from .errors import UnsupportedDtypeError
from .policy import Dtype, normalise_dtype


class Casting:
    """Regions, annotated functions and prepared models of one session; `Amp` adds the rest."""

    backend: Backend
    plan: CastPlan | None
    effective: Effective
    casting: CastPlan | None

    def prepare(self, model: Any, opt: Any = None) -> Any:
        """Do to a model what the level needs (O2, O3) and resolve name patterns of the op lists.

        Args:
            model: The framework's model; changed in place where the framework can.
            opt: Its optimizer, raw or wrapped; for O2 it then updates float32 master weights.

        Returns:
            The model, or (model, opt) where an optimizer was given.

        Raises:
            UnsupportedByBackendError: The backend has no such level.

        Sync: none.
        """
        if self.casting is None:
            return model if opt is None else (model, opt)
        return self.backend.prepare(model, opt, self.casting)

    def autocast(self, enabled: bool = True, dtype: object = None) -> annotate.Region:
        """Give a region with casting on or off; nestable, exception safe, also a decorator.

        Args:
            enabled: False computes in float32 inside.
            dtype: Compute dtype inside; the session's by default.

        Raises:
            UnsupportedDtypeError: The device cannot compute in it.

        Sync: none.
        """
        wanted = None if dtype is None else normalise_dtype(dtype)
        return annotate.Region(lambda: self.autocast_now(enabled, wanted))

    def autocast_now(self, enabled: bool, dtype: Dtype | None = None) -> AbstractContextManager[Any]:
        """Give the backend's own region, to be entered at once."""
        plan = self.casting
        if plan is None:
            return nullcontext()
        if dtype == "float32":
            enabled = False
        elif dtype is not None and dtype != plan.dtype:
            device = self.backend.device(plan.device)
            supported = device.native | device.emulated
            if dtype not in supported:
                raise UnsupportedDtypeError(
                    f"autocast(dtype={dtype!r}) is not supported by backend {self.backend.name!r} on {plan.device!r}; "
                    f"supported: {', '.join(sorted(supported))}. Choose one of these."
                )
            plan = self.backend.check_plan(CastPlan(plan.device, dtype, plan.level, plan.allow, plan.deny))
        return self.backend.autocast(plan, enabled)

    def enter_thread(self) -> None:
        """Switch process-wide casting on in the calling thread too; call it first thing in a new thread.

        Frameworks keep the switch by thread. A thread pool takes it as `initializer=amp.enter_thread`.

        Sync: none.
        """
        if self.casting is not None and self.effective.process_wide:
            self.backend.enter_thread(self.casting)

    def float_function(self, function: annotate.Function) -> annotate.Function:
        """Compute a function in float32: floating arguments are cast, casting is off inside. Sync: none."""
        return annotate.annotate(function, "float", lambda *_: self)

    def half_function(self, function: annotate.Function) -> annotate.Function:
        """Compute a function in the compute dtype: floating arguments are cast, casting is off inside. Sync: none."""
        return annotate.annotate(function, "half", lambda *_: self)

    def promote_function(self, function: annotate.Function) -> annotate.Function:
        """Compute a function in the widest dtype of its floating arguments, casting off inside. Sync: none."""
        return annotate.annotate(function, "promote", lambda *_: self)
