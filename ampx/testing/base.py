"""What all kit tests share: a fresh session for every test, and selection by capability."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis
import pytest

import ampx
from ampx.backend import find_offer
from ampx.plugins import default_registry
from ampx.session import Amp

from .bench import Bench
from .harness import Harness, ValueHarness
from .value_bench import ValueBench


class KitTests:
    """Base of the kit's test classes.

    Attributes:
        harness: The harness's class.
        hypothesis: How many random cases are tried; repeatable, so that a failure is not a coincidence.
    """

    harness: ClassVar[type[Harness]]
    hypothesis: ClassVar[hypothesis.settings] = hypothesis.settings(
        max_examples=100, deadline=None, database=None, derandomize=True
    )

    def setup_method(self) -> None:
        """Make a harness and register its plugin where no entry point did."""
        ampx.shutdown()
        self.subject = self.harness()
        name = self.subject.framework
        if name not in default_registry().names() and name not in default_registry().broken:
            ampx.register_plugin(importlib.import_module(self.subject.plugin))
        self.backend = default_registry().load(name)
        self.outside = self.subject.casting()

    def teardown_method(self) -> None:
        """End the session."""
        ampx.shutdown()

    def start(self, loss_scale: object = None, **options: Any) -> Amp:
        """Start a session with casting at O1 where the backend has it; the loss scale is dynamic by default."""
        casts = self.declares("casting")
        settings = {
            "dtype": self.subject.dtype if casts else "float32",
            "level": "O1" if casts else "O0",
            "device": self.subject.device,
            "loss_scale": ampx.LossScale() if loss_scale is None else loss_scale,
            **options,
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* emulated", ampx.PrecisionWarning)  # slow hardware is no defect
            return ampx.init(self.subject.framework, **settings)

    def bench(self, amp: Amp, momentum: bool = False, **options: Any) -> Bench:
        """Wrap an optimizer over two parameters."""
        return self.plain(momentum).wrap(amp, **options)

    def group(self, amp: Amp, **options: Any) -> tuple[Bench, Bench]:
        """Wrap two optimizers as one list."""
        a, b = self.plain(), self.plain()
        first, second = amp.wrap_optimizer([a.raw, b.raw], **options)
        return a.join(amp, first), b.join(amp, second)

    def plain(self, momentum: bool = False) -> Bench:
        """Make an optimizer like that of `bench`, but without ampx."""
        if isinstance(self.subject, ValueHarness):
            return ValueBench(self.subject, momentum)
        return Bench(self.subject, momentum)

    def prepared(self, amp: Amp) -> Bench:
        """Wrap an optimizer over the parameters of a model that `prepare` gets, with the optimizer."""
        bench, model = self.plain(), self.subject.model()
        bench.raw = self.subject.optimizer(self.subject.parameters_of(model), momentum=False)
        model, opt = amp.prepare(model, amp.wrap_optimizer(bench.raw))
        bench.parameters = self.subject.parameters_of(model)
        return bench.join(amp, opt)

    def declares(self, ability: str) -> bool:
        """Return whether the backend has an ability: a field of `Capabilities`, or one of the words below."""
        can = self.backend.capabilities
        # A framework may cast on one device and not on another: what is tested is the harness's.
        device = self.backend.device(self.subject.device)
        casts = "O1" in can.levels and bool(device.native | device.emulated)
        derived = {
            "implicit gradients": can.gradients == "implicit",
            "optimizer objects": not self.writes("state_handle"),
            "promotes": self.writes("widest"),
            "names_gradients": self.writes("nonfinite_parameters"),
            "closures": self.subject.closures,
            "probe": "probe" in self.backend.offers,
            "automation": "automation" in self.backend.offers,
            "explicit gradients": can.gradients == "explicit",
            "casting": casts,
            "process casting": casts and can.autocast in ("scoped", "process"),
            "regions": casts and can.autocast == "scoped",
            "op_lists": casts and can.op_lists,
            "master_weights": casts and "O2" in can.levels,
            "clip_grad_norm": can.clipping and can.gradients == "implicit",
            "converter": "converter" in self.backend.offers
            and (self.subject.converts_to is not None or self.subject.dtype in device.native | device.emulated),
            "prepare": casts and bool({"O2", "O3"} & can.levels),
        }
        if ability == "simulates":
            from ampx.numerics.probe import Probe  # the kit runs without it, too

            probe = find_offer(self.backend, Probe)
            return probe is not None and bool(probe.simulates(device))
        return derived[ability] if ability in derived else bool(getattr(can, ability))

    def writes(self, verb: str) -> bool:
        """Return whether the backend overrides a verb whose default refuses or returns nothing."""
        return getattr(type(self.backend), verb) is not getattr(ampx.Backend, verb)


def requires(ability: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Run a test where the ability is declared; where it is not, check that the call is refused.

    No test is skipped for a capability: an ability that is not declared is tested for its refusal instead. Where
    there is nothing that could be refused, the skip says so.
    """

    def decorate(test: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(test)
        def selected(self: KitTests) -> None:
            if self.declares(ability):
                test(self)
                return
            from .refusals import REFUSALS  # a cycle at import time: refusals use the base class

            refusal = REFUSALS.get(ability)
            if refusal is None:
                pytest.skip(f"backend {self.backend.name!r} does not declare {ability}: there is no call to refuse")
            refusal(self)

        return selected

    return decorate
