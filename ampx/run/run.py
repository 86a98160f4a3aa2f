"""One framework's share in a run of `ampx run`."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, cast

import ampx
from ampx.backend import Contract, prepare_line
from ampx.callers import script_line
from ampx.errors import AmpxError, InvalidOptionError, RunRefusedError
from ampx.plugins import ProvideNames, default_registry
from ampx.policy import PolicyFile, find_level
from ampx.rooms import METER_EVERY, is_there
from ampx.session import sessions

from .recorder import Recorder
from .started_sessions import Following

if TYPE_CHECKING:
    from ampx.policy import Effective
    from ampx.session import Amp


_NAMED: Final = 5  # so many optimizers get a name each by hand
_BY_ITSELF: Final = ("the script has it by hand: its own calls decide",)


@dataclass(frozen=True)
class RunSettings:
    """What the user asked `ampx run` for.

    Attributes:
        dtype: As in `ampx.init`: `"auto"`, or a dtype.
        level: As in `ampx.init`.
        device: As in `ampx.init`.
        replace_native: The script's own mixed precision is carried out by ampx; without it such a script is refused.
        stand_ins_only: Nothing is automated; the script finds the modules that backends provide where they are missing.
        allow: As in `ampx.init`; `"module:name"` needs no `prepare` here.
        deny: As in `ampx.init`; `"module:name"` needs no `prepare` here.
        loss_scale: As in `ampx.init`; None for the default.
        policy: A policy file, whose settings these are; "" for none.
        enabled: False where the policy file says so: nothing is automated, as with `stand_ins_only`.
        watched: `Probe.watch(None, …)` will be entered between steps: a backend that compiles runs uncompiled, or
            compiles anew then.
        meter_every: Every so many steps the meter looks at an update.
    """

    dtype: str = "auto"
    level: str = "O1"
    device: str = "auto"
    replace_native: bool = False
    stand_ins_only: bool = False
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    loss_scale: float | str | None = None
    policy: str = ""
    enabled: bool = True
    watched: bool = False
    meter_every: int = METER_EVERY

    def by_policy(self, path: str | os.PathLike[str]) -> RunSettings:
        """Return these settings, with those of a policy file where they have their defaults.

        Raises:
            PolicyFileError: The file cannot be read.
        """
        file = PolicyFile.read(path)
        wanted = "auto" if self.loss_scale is None else self.loss_scale
        dtype, level, loss_scale, allow, deny = file.combined(
            self.dtype, find_level(self.level).name, wanted, self.allow, self.deny
        )
        return replace(
            self,
            dtype=str(dtype),
            level=level,
            loss_scale=None if loss_scale == "auto" else cast("float | str", loss_scale),
            allow=tuple(allow),
            deny=tuple(deny),
            policy=os.path.abspath(path),
            enabled=file.enabled,
        )

    @property
    def automates(self) -> bool:
        """Whether anything is automated."""
        return self.enabled and not self.stand_ins_only


@dataclass(eq=False)
class Run:
    """What a backend's `automate` receives: the settings, the session, the recorder, and the way to refuse.

    Attributes:
        framework: Name of the framework that this backend automates.
        settings: What the user asked for.
        recorder: Takes down what the summary tells; one for the whole run.
        peers: The `Run` of every framework in this process, this one included.
        amp: The session once it is started; None before.
        refusal: The error of the first call of `refuse`, which the script may have caught.
        misuse: An option of the command that cannot be honoured, which the script may have caught.
        stood_down: What the script does by itself, for a sentence; "" while this run automates it.
        provided: Modules that the script imported, are missing here, and that the backend provided.
        lines: The lines of code that do the same by hand, or none. Set it where those of `explain` do not fit.
        noun: What users of the framework call an optimizer, for those lines.
        backward: What stands in the body of `scale_loss` by hand.
        trainer: The lines of code that give a trainer of another library its part, in place of those that wrap
            optimizers and scale losses, which have no place there.
        float32: The step under way is to compute in float32, whatever the regions of the script say.
        effective: What was in effect, where no session says it or another dtype computed; else the session's counts.
    """

    framework: str
    settings: RunSettings = field(default_factory=RunSettings)
    recorder: Recorder = field(default_factory=Recorder)
    peers: list[Run] = field(default_factory=list)
    amp: Amp | None = None
    refusal: RunRefusedError | None = None
    misuse: InvalidOptionError | None = None
    stood_down: str = ""
    provided: list[str] = field(default_factory=list)
    lines: tuple[str, ...] | None = None
    noun: str = "optimizer"
    backward: str = "scaled.backward()"
    trainer: tuple[str, ...] = ()
    float32: bool = False
    effective: Effective | None = None
    _followed: list[Following] = field(default_factory=list)
    _starting: bool = False
    _waiting: str = ""
    _was_on: bool = False
    _end_watch: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.peers.append(self)

    def session(self, **options: Any) -> Amp:
        """Return the session of this framework, starting it at the first call.

        A backend calls this when the script makes its first optimizer, and not earlier: a script may import a
        framework that it does not train with.

        Args:
            **options: What to pass to `ampx.init` beyond the settings, such as `process_wide=False`.

        Raises:
            RunRefusedError: The script trains with another framework, too.
            InvalidOptionError: The settings cannot be honoured.
        """
        if self.amp is not None:
            return self.amp
        others = [peer.framework for peer in self.peers if peer.amp is not None]
        if others:
            self.refuse(
                f"the script trains with {others[0]} and with {self.framework}; accepted: one framework. Name the one "
                f"to automate with --framework"
            )
        settings = self.settings
        chosen: dict[str, Any] = {
            "dtype": settings.dtype,
            "level": settings.level,
            "device": settings.device,
            "nan_loss": "skip",
            "allow": settings.allow,
            "deny": settings.deny,
        }
        if settings.loss_scale is not None:
            chosen["loss_scale"] = settings.loss_scale
        if settings.policy:
            chosen["policy"] = settings.policy
        self._starting = True
        try:
            self.amp = ampx.init(self.framework, **{**chosen, **options})
        except ampx.AmpxError as error:
            self.reject(error)
        finally:
            self._starting = False
        self.amp.on_event(self.recorder.hear)
        self._meter(self.amp)
        self._was_on = True
        return self.amp

    def _meter(self, amp: Amp) -> None:
        """Have the recorder read the meters of a session's optimizers."""
        self.recorder.meter_every = self.settings.meter_every
        amp.meter_every = self.settings.meter_every if is_there("ampx.numerics") else 0

        def read() -> Iterator[tuple[int, str, Any]]:
            for group in amp.live_groups():
                for wrapped in amp.optimizers_of(group):
                    yield id(wrapped), _kind_of(wrapped), wrapped.meter

        self.recorder.metering = read

    def stand_down(self, why: str, waits: bool = False) -> None:
        """End the session of this run, because the script has mixed precision of its own that ampx carries out.

        Args:
            why: What the script uses, to follow "by itself, with".
            waits: It has switched nothing on so far, and perhaps never will.

        Sync: as `Amp.shutdown`.
        """
        if self.stood_down:
            return
        self.stood_down = why
        if waits:
            self._waiting = "from then on" if self._was_on else "all the time"
        if self.amp is not None:
            self.amp.shutdown()
            self.amp = None
        self.recorder.stop_sampling()
        self.lines = () if waits else _BY_ITSELF

    def record_own_sessions(self, began: Callable[[], None], kind_of: Callable[[Any], str] | None = None) -> None:
        """Have the sessions that the script starts itself recorded, by an old recipe or by ampx, until `close`.

        As soon as one starts, this run's own session is over and `stood_down` is set. The recorder tells of the
        session's loss scales, skips and steps, and the report of its device, dtype and level. What is left to the
        backend: not to scale, unscale or cast any more; to call `look` after every step or in every backward; and
        to go on with `recorder.phase` and, while `recorder.sampling`, with `recorder.count_op`. An old recipe
        names itself by setting `recipe` of the session that it starts.

        Args:
            began: Called with every such session, once it is the framework's.
            kind_of: Returns the name of the script's class, of a wrapped optimizer; by default that of what the
                wrapper holds as `optimizer`.
        """

        def started(amp: Amp) -> None:
            if amp.framework != self.framework or self._starting:
                return
            self.stand_down("ampx")
            self.amp, self.lines = amp, _BY_ITSELF
            self._meter(amp)
            self.recorder.restart_sampling()
            self._followed.append(Following(self.recorder, amp, kind_of or _kind_of))
            began()

        self._end_watch = sessions.watch(started)
        active = sessions.get(self.framework)
        if active is not None and active is not self.amp:
            started(active)

    def look(self) -> None:
        """Bring the records of a session that the script started up to date."""
        if self._followed:
            self._followed[-1].look()

    def begin_child(self) -> None:
        """Count from here, in a copy of the process."""
        for following in self._followed:
            following.begin_child()

    def close(self) -> None:
        """End the session, where one was started; the last thing a backend does on leaving. Sync: as `Amp.shutdown`.

        A session of the script's own stays, as it does without `ampx run`.
        """
        self._end_watch()
        for following in self._followed:
            following.finish()
        if self.amp is not None:
            self.recorder.read_meters()
        if self.amp is not None and not self._followed:
            self.amp.shutdown()
        if self._waiting and not self._followed:
            self.recorder.notes.append(
                f"The script imports {self.stood_down}, which decides what is cast, and switched nothing on: "
                f"{self._waiting} it computed as it does without ampx. Pass its own option for mixed precision."
            )
        elif self.stood_down:
            recipes = {following.amp.recipe or self.stood_down for following in self._followed} or {self.stood_down}
            chosen = replace(self.settings, replace_native=False) != RunSettings()
            self.recorder.notes.append(
                f"The script started mixed precision by itself, with {' and '.join(sorted(recipes))}; ampx carried "
                f"that out, and this run did not automate it{': its options do not hold there' if chosen else ''}."
            )

    def refuse(self, reason: str, where: str | None = None) -> NoReturn:
        """Stop the script, because going on would not train what the script means.

        The script ends with the reason on stderr, or is started anew without ampx where the user asked for that.

        Args:
            reason: What the script does, why that cannot be automated, and what to do instead. No final stop.
            where: `"file:line"`; the script's own innermost line by default.

        Raises:
            RunRefusedError: Always.
        """
        place = script_line() if where is None else where
        error = RunRefusedError(f"{place}: {reason}." if place else f"{reason}.")
        if self.refusal is None:
            self.refusal = error
        raise error

    def reject(self, error: AmpxError) -> NoReturn:
        """Stop the script, because an option of the command cannot be honoured.

        Raises:
            InvalidOptionError: Always.
        """
        self.misuse = self.misuse or InvalidOptionError(f"the options cannot be honoured: {error}")
        raise self.misuse from error

    def refuse_for(self, error: AmpxError) -> NoReturn:
        """Refuse with what an error of ampx says; an earlier refusal stays as it is.

        Raises:
            RunRefusedError: Always.
        """
        if isinstance(error, RunRefusedError) or error is self.misuse:
            raise error
        self.refuse(str(error).rstrip("."))

    def old_names(self) -> list[ProvideNames]:
        """Return what lets the script import modules for which plugins stand in: each takes the backend's manager."""
        return [stand_in.load() for stand_in in default_registry().stand_ins(self.framework)]

    def refuse_preparation(self) -> None:
        """Refuse levels O2 and O3 where the backend needs the model for them; before anything is patched.

        Raises:
            RunRefusedError: One of them was asked for: which model to prepare cannot be told from outside.
        """
        if self.settings.level in ("O2", "O3"):
            self.refuse(
                f"--level {self.settings.level} needs ampx.prepare(model, optimizer), and which model that is cannot "
                f"be told from outside; accepted: O0, O1. Use --level O1",
                where="",
            )

    def init_call(self, **options: Any) -> str:
        """Return the line of code that starts the session by hand, once it is started.

        Args:
            **options: Arguments of `ampx.init` beyond the settings.
        """
        settings = self.settings
        if settings.policy:  # it says what is allowed and denied, too
            chosen: dict[str, Any] = {"policy": settings.policy}
        else:
            dtype = None if self.amp is None else self.amp.effective.dtype
            chosen = {"dtype": dtype or "float32", "level": settings.level}
            chosen |= {name: list(entries) for name in ("allow", "deny") if (entries := getattr(settings, name))}
            chosen |= {} if settings.loss_scale is None else {"loss_scale": settings.loss_scale}
        if self.trainer:
            chosen["process_wide"] = False  # the trainer's own regions cast
        arguments = "".join(f", {name}={value!r}" for name, value in {**chosen, **options}.items())
        return f"amp = ampx.init({self.framework!r}{arguments})"

    def prepare_lines(self) -> tuple[str, ...]:
        """Return the line of code by which the session finds the modules that the settings name, once it is started."""
        finds = self.amp is not None and self.amp.backend.prepare_finds_modules
        lines = prepare_line((*self.settings.allow, *self.settings.deny), finds)
        return tuple(f"{line}  # the model whose modules are named" for line in lines)

    def explain(self) -> tuple[str, ...]:
        """Return the lines of code that do by hand what this run did; none where nothing was cast."""
        if self.amp is not None and self.amp.effective.dtype is None and not self.stood_down:
            return ()
        if self.lines is not None or self.amp is None:
            return self.lines or ()
        return (self.init_call(), *self.prepare_lines(), *self.optimizer_lines())

    def optimizer_lines(self, *between: str) -> tuple[str, ...]:
        """Return the lines of code that wrap the script's optimizers by hand, and scale the loss for them.

        Args:
            *between: What stands before the line that scales the loss.
        """
        if self.trainer:
            return self.trainer
        records = list(self.recorder.optimizers.values())
        # Keras's `compile` makes one that a training step of the script's own never uses.
        trained = [record for record in records if record.steps] or records
        # Once for each line that makes optimizers: that is where it would be written.
        groups = list(dict.fromkeys(tuple(record.optimizers) for record in trained))
        count = sum(map(len, groups))
        if count < 2:
            scale = f"with ampx.scale_loss(loss, {self.noun}) as scaled: {self.backward}"
            return (f"{self.noun} = ampx.wrap_optimizer({self.noun})", *between, scale)
        origins = [f"{kind} of {PurePath(place).name}" if place else kind for group in groups for kind, place in group]
        if count > _NAMED and count == len(groups):  # each has a loss scale of its own
            every, shown = f"{self.noun}s", f"{count}, such as {', '.join(origins[:2])}"
            wrapped = f"[ampx.wrap_optimizer({self.noun}) for {self.noun} in {every}]"
            scale = f"with ampx.scale_loss(loss, {every}) as scaled: {self.backward}"
            return (f"{every} = {wrapped}  # {shown}", *between, f"{scale}  # of these, those that the loss trains")
        names = [f"{self.noun}_{number}" for number in range(1, count + 1)]
        scale = f"with ampx.scale_loss(loss, [{', '.join(names)}]) as scaled: {self.backward}"
        return (*_wrap_lines(groups, names, origins), *between, f"{scale}  # of these, those that the loss trains")


def _wrap_lines(groups: Iterable[Sized], names: Sequence[str], origins: Sequence[str]) -> list[str]:
    """Return the lines that wrap optimizers, a line a group, which shares one loss scale."""
    lines, first = [], 0
    for group in groups:
        last = first + len(group)
        listed = ", ".join(names[first:last])
        passed = listed if len(group) == 1 else f"[{listed}]"
        lines.append(f"{listed} = ampx.wrap_optimizer({passed})  # {', '.join(origins[first:last])}")
        first = last
    return lines


def _kind_of(wrapped: Any) -> str:
    return type(getattr(wrapped, "optimizer", wrapped)).__name__


class Automation(Contract):
    """What `ampx run` needs of a framework."""

    name: ClassVar[str] = "automation"
    feature: ClassVar[str] = "ampx run"

    @abc.abstractmethod
    def automate(self, run: Run) -> AbstractContextManager[Any]:
        """Return a region in which a script that knows nothing of ampx trains in mixed precision: see `ampx.run`.

        Sync: none; inside, as the wrapped optimizers do.
        """
