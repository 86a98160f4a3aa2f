"""One batch of a model on its backend: replayed in a dtype, with modules forced and watched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, is_dataclass
from inspect import isroutine
from typing import Any, Final, cast

from ampx.backend import Backend, CastPlan, Device, is_module, offer
from ampx.errors import InvalidOptionError, UnsupportedDtypeError, UnsupportedLevelError, shown
from ampx.formats import FORMATS, find_format
from ampx.modules import module_dtypes
from ampx.plugins import default_registry
from ampx.policy import Dtype, OptLevel, find_level, normalise_dtype
from ampx.session import listed, sessions

from .probe import Probe, Reading, Replayed, Step, Watching

SAMPLES: Final = 4096
# Where the loss scale of float16 begins, as `LossScale` has it.
INIT_SCALE: Final = 2.0**16


@dataclass(frozen=True)
class Casting:
    """In what a batch is computed.

    Attributes:
        dtype: Of the computation; `"float32"` casts nothing.
        plan: What `Probe.replay` takes.
        forced: By pattern of names of modules, the dtype that they are forced into.
        simulated: The device does not compute the dtype: values are rounded to it.
    """

    dtype: str
    plan: CastPlan | None
    forced: Mapping[str, str]
    simulated: bool = False


FLOAT32: Final = Casting("float32", None, {})


@dataclass(frozen=True)
class Seen:
    """What a replay returned and, where it was watched, what was read in it.

    Attributes:
        replayed: What the replay returned; gradients may be samples of the true ones.
        readings: What was read.
        skipped: Whether the step of the batch was skipped; None where none was made.
        largest_loss: The largest loss of the steps up to this one; 0 where only this one is known.
        tolerance: How far rounding alone may move the loss, as `loss_error` has it; None where that is not known.
        fails_later: Training does not go on behind this step; false where that is not known.
    """

    replayed: Replayed
    readings: tuple[Reading, ...] = ()
    skipped: bool | None = None
    largest_loss: float = 0.0
    tolerance: float | None = None
    fails_later: bool = False

    @property
    def finite(self) -> bool:
        """Whether the loss and every gradient that trains are finite; what is masked on the way does not count."""
        return math.isfinite(self.replayed.loss) and not self.overflows

    @property
    def overflows(self) -> bool:
        """Whether the gradients are not finite: the step was skipped, or would be."""
        import numpy as np

        return self.skipped or not all(np.isfinite(gradient).all() for gradient in self.replayed.gradients.values())

    @property
    def only_gradients_overflow(self) -> bool:
        """Whether the loss is finite, and the gradients are not."""
        return math.isfinite(self.replayed.loss) and self.overflows


@dataclass(frozen=True)
class Refusal:
    """What a framework raised in low precision.

    Attributes:
        message: Type and message, in one line.
        seen: What was read before it raised.
        line: The line of the user's own code that it came from; "" for unknown.
    """

    message: str
    seen: Sequence[Reading] = ()
    line: str = ""


# What stands in front of an error's own words: in MXNet its frames, in Keras the layer. Keras makes words bold.
_AROUND: Final = ("Traceback ", "Exception encountered when calling ")
_BOLD: Final = re.compile(r"\x1b\[\d*m")


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of what was raised, without what a framework put in front of it."""
    name = type(error).__name__
    lines = [line for line in _BOLD.sub("", str(error)).strip().splitlines() if line.strip()] or ["(no message)"]
    if lines[0].startswith(_AROUND[0]):
        lines = lines[-1:]  # which has the type, too
    own = next((line for line in lines if not line.startswith(_AROUND)), lines[0])
    return f"{name}: {own.strip().removeprefix(f'{name}: ')}"


class Batch:
    """One batch that can be computed again and again."""

    def __init__(self, step: Step, model: Any, framework: str | None, device: str | None = None) -> None:
        if not callable(step) or isroutine(model):
            raise InvalidOptionError(
                f"step={shown(step)} and model={shown(model)} are not a function and a model; accepted: a function "
                f"that takes the model and returns the loss of one batch, then the model (JAX: its parameters). Pass "
                f"them in this order."
            )
        active = {session.framework: session for session in sessions.all_sessions()}
        name = framework or (next(iter(active)) if len(active) == 1 else default_registry().guess())
        self.backend: Backend = default_registry().load(name)
        self.probe = offer(self.backend, Probe)
        self.session = active.get(name)
        place = device or (self.session.effective.device if self.session is not None else "auto")
        self.device: Device = self.backend.device(place)
        self.step, self.model = step, model
        self.read_before_error: tuple[Reading, ...] = ()  # in the last run that raised

    @property
    def _simulated(self) -> frozenset[str]:
        return self.probe.simulates(self.device)

    def dtype(self, wanted: object = None) -> str:
        """Return the dtype that is meant: the one asked for, the session's, or what the device prefers.

        Raises:
            UnsupportedDtypeError: There is no such dtype, or none that this device computes.
        """
        if wanted is not None:
            return find_format(wanted)
        effective = self.session.effective.dtype if self.session is not None else None
        computed = [*sorted(self.device.native), *sorted(self.device.emulated)]
        choice = effective or self.device.preferred or next(iter(computed), None)
        if choice is None:
            raise UnsupportedDtypeError(
                f"no dtype was given, and {self.device.name} computes none but float32 ({self.device.reason}); "
                f"accepted: {', '.join(sorted(self._simulated)) or 'float32 only'}. Name one by "
                f"dtype=… to have it simulated, or use another device."
            )
        return choice

    def casting(
        self,
        dtype: str,
        level: OptLevel = "O1",
        allow: Iterable[Any] = (),
        deny: Iterable[Any] = (),
        simulate: bool = False,
    ) -> Casting:
        """Return in what a batch is computed; module patterns of the op lists become forced modules.

        Raises:
            UnsupportedDtypeError: The device neither computes nor simulates the dtype.
            UnsupportedLevelError: The level changes parameters, which a replay does not.
            UnsupportedOpError: An entry of allow or deny cannot be honoured.
        """
        if find_level(level).name not in ("O0", "O1"):
            raise UnsupportedLevelError(
                f"level={level!r} changes the parameters, and a replay leaves them as they are; accepted: 'O0', 'O1'. "
                f"Pass 'O1': it shows what computing in low precision does; or prepare the model before."
            )
        if dtype == "float32" or level == "O0":
            return FLOAT32
        allowed, denied = listed("allow", allow), listed("deny", deny)
        forced = module_dtypes(CastPlan(self.device.name, cast(Dtype, dtype), "O1", allowed, denied))
        computed = self.device.native | self.device.emulated
        if simulate or dtype not in computed:
            if dtype not in self._simulated:
                raise UnsupportedDtypeError(
                    f"dtype={dtype!r} is neither computed nor simulated by backend {self.backend.name!r} on "
                    f"{self.device.name!r} ({self.device.reason}); accepted: "
                    f"{', '.join(sorted(computed | self._simulated)) or 'none'}. Choose one of these."
                )
            return Casting(dtype, None, {"*": dtype, **forced}, simulated=True)
        operations = [[entry for entry in entries if not is_module(entry)] for entries in (allowed, denied)]
        plan = CastPlan(self.device.name, normalise_dtype(dtype), "O1", tuple(operations[0]), tuple(operations[1]))
        return Casting(dtype, self.backend.check_plan(plan), forced)

    def run(self, casting: Casting = FLOAT32, scale: float = 1.0, watching: Watching | None = None) -> Seen:
        """Replay the batch."""
        with ExitStack() as stack:
            stack.enter_context(self._forced(casting))
            if watching is None:
                return Seen(self.probe.replay(self.model, self.step, casting.plan, scale))
            watch = stack.enter_context(self.probe.watch(self.model, watching))
            try:
                replayed = self.probe.replay(self.model, self.step, casting.plan, scale)
            except Exception:
                self.read_before_error = tuple(watch.readings())
                raise
            return Seen(replayed, tuple(watch.readings()))

    def clock(self, casting: Casting) -> Callable[[], float]:
        """Return a function that computes the batch and its gradients, and returns the seconds that took."""
        with self._forced(casting):
            seconds = self.probe.clock(self.model, self.step, casting.plan)

        def measure() -> float:
            with self._forced(casting):
                return seconds()

        return measure

    def _forced(self, casting: Casting) -> AbstractContextManager[Any]:
        return self.probe.force(self.model, casting.forced) if casting.forced else nullcontext()


def fitting_scale(dtype: str, reference: Seen) -> float:
    """Return the loss scale that training would settle at: the largest whose gradients a dtype can hold.

    It is a power of two up to that where `LossScale` begins; 1 for a dtype with the exponents of float32.

    Args:
        dtype: A name of `FORMATS`.
        reference: The batch in float32, watched.
    """
    import numpy as np

    if not scaled(dtype):
        return 1.0
    values = [entry.value.largest for entry in reference.readings if entry.direction == "backward"]
    values += [float(np.abs(gradient).max(initial=0.0)) for gradient in reference.replayed.gradients.values()]
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    if not largest:
        return INIT_SCALE
    # Between two modules gradients may be larger than at their outputs: two bits are left for that.
    return min(INIT_SCALE, max(1.0, 2.0 ** math.floor(math.log2(FORMATS[dtype].largest / 4 / largest))))


def scaled(dtype: str) -> bool:
    """Return whether a dtype needs a loss scale: it has fewer exponents than float32."""
    return FORMATS[dtype].smallest > FORMATS["bfloat16"].smallest


def plain(value: Any) -> Any:
    """Return a value as plain JSON types; numbers that are not finite as strings, arrays left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) else None
