"""The contract between ampx and a framework.

A backend is stateless: it maps a handful of verbs onto the framework's own functions. What it can do
beyond the abstract verbs it declares in `Capabilities`; what the features around core need of its framework, it offers
as contracts of their own (`Contract`). What it neither declares nor offers raises `UnsupportedByBackendError`. The
conformance kit `ampx.testing` tests all of it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

from .errors import (
    BackendLoadError,
    InvalidOptionError,
    MissingPartError,
    UnsupportedByBackendError,
    UnsupportedDeviceError,
)
from .policy import Dtype, OptLevel
from .protocol import Handle, Member
from .rooms import import_part
from .scale_state import Scalar

# Values of the framework: only a backend looks inside.
Tree: TypeAlias = Any
Loss: TypeAlias = Any
Grads: TypeAlias = Any
Optimizer: TypeAlias = Any

# A float32 array of NumPy, which every framework brings along and core never imports.
Array: TypeAlias = Any


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. The defaults promise nothing.

    Attributes:
        devices: Kinds of device, the preferred first.
        dtypes: Low-precision dtypes that some device supports.
        levels: Opt levels.
        gradients: `"implicit"`: gradients hang on the parameters and `opt.step()` takes none.
            `"explicit"`: gradients are values and `opt.step(grads)` takes them.
        autocast: `"scoped"`: a region. `"process"`: only for the whole process. `"explicit"`: the user
            applies a function transform. `"none"`: no casting.
        op_lists: `allow` and `deny` of `init` are honoured.
        clipping: `max_grad_norm`, `max_grad_value` and `clip_grad_norm` work: the verb `clip`, or a wrapper's own.
        per_loss_scales: `scale_loss(…, loss_id=…)` accepts several ids for one optimizer.
        vector_losses: `scale_loss` takes losses of any shape, whose elements the framework's backward adds up.
        sees_backward: A step is refused where backward was called on the loss itself, in the block that scaled it:
            the verb `watch_backward`.
    """

    devices: tuple[str, ...] = ("cpu",)
    dtypes: frozenset[Dtype] = frozenset()
    levels: frozenset[OptLevel] = frozenset({"O0"})
    gradients: Literal["implicit", "explicit"] = "implicit"
    autocast: Literal["scoped", "process", "explicit", "none"] = "none"
    op_lists: bool = False
    clipping: bool = False
    per_loss_scales: bool = False
    vector_losses: bool = False
    sees_backward: bool = False


@dataclass(frozen=True)
class Device:
    """What one device computes.

    Attributes:
        name: The framework's name for it, such as `"cuda"` or `"cpu"`.
        native: Low-precision dtypes it computes in hardware.
        emulated: Low-precision dtypes that work, but slowly.
        preferred: What `dtype="auto"` picks, or None for no mixed precision.
        reason: Why, in one sentence for `amp.effective` and `ampx doctor`.
        details: Further facts for `ampx doctor`.
    """

    name: str
    native: frozenset[Dtype] = frozenset()
    emulated: frozenset[Dtype] = frozenset()
    preferred: Dtype | None = None
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CastPlan:
    """The casting that a session asks for. A backend's `check_plan` may replace it by a subclass of its own.

    Attributes:
        device: Name of the device.
        dtype: The compute dtype.
        level: The opt level.
        allow: What to compute in `dtype` beyond the framework's own list.
        deny: What to compute in float32.
        scales: Whether the session scales losses, unless a wrapped optimizer has it otherwise.
        float32_modules: Patterns of modules that `Forcing.force` computes in float32 while the session lasts.
    """

    device: str
    dtype: Dtype
    level: OptLevel = "O1"
    allow: tuple[Any, ...] = ()
    deny: tuple[Any, ...] = ()
    scales: bool = False
    float32_modules: tuple[str, ...] = ()


class LossInfo(NamedTuple):
    """What ampx checks about a loss.

    Attributes:
        elements: Number of elements.
        dtype: Name of the dtype, for messages.
        floating: Whether the dtype is floating.
        attached: Whether gradients can flow from it.
        nan: Whether it is NaN; None where the answer would need a sync that was not asked for.
    """

    elements: int
    dtype: str
    floating: bool
    attached: bool
    nan: bool | None


class Unscaled(NamedTuple):
    """Unscaled gradients, and whether all are finite (a bool, or a boolean scalar on the device)."""

    grads: Grads
    finite: Scalar


class Backend(abc.ABC):
    """What ampx calls of a framework. Plugins derive from it; it holds no state.

    Derive from `GenericBackend` instead where ampx itself steps the optimizers.

    Attributes:
        name: Name of the framework, as `init` takes it.
        capabilities: What it can do.
        optimizers: What `wrap_optimizer` accepts, in words, for its errors.
        prepare_finds_modules: At O1 modules that `allow` and `deny` name are those that `prepare` is passed; else they
            are known by their names when they are called.
        offers: By name of a `Contract`, the class that fulfils it: the class itself, or `"module:class"`, which is
            imported on first use.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    optimizers: ClassVar[str] = "one of the framework's optimizers"
    prepare_finds_modules: ClassVar[bool] = False
    offers: ClassVar[Mapping[str, str | type[Contract]]] = {}

    @abc.abstractmethod
    def device(self, name: str) -> Device:
        """Describe a device.

        Args:
            name: A device of `capabilities.devices`, or `"auto"` for the best present.

        Raises:
            UnsupportedDeviceError: There is no such device here.
        """

    @abc.abstractmethod
    def is_optimizer(self, candidate: object) -> bool:
        """Return whether this is an optimizer of the framework, and no `WrappedOptimizer`."""

    @abc.abstractmethod
    def autocast(self, plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
        """Return a region with casting on or off; what was before is restored on any exit."""

    @abc.abstractmethod
    def cast(self, tree: Tree, dtype: Dtype) -> Tree:
        """Cast the floating leaves of a tree; others, and None, are returned as they are.

        Args:
            tree: Tensors in tuples, lists and dicts.
            dtype: The target dtype.
        """

    @abc.abstractmethod
    def inspect_loss(self, loss: Loss, check_nan: bool | None) -> LossInfo:
        """Return what `scale_loss` has to know about a loss.

        Args:
            loss: Anything the user passed.
            check_nan: True: look even if that syncs. None: look where it is free. False: do not look.

        Raises:
            LossDtypeError: It is no tensor of the framework.

        Sync: none unless `check_nan` is True.
        """

    @abc.abstractmethod
    def scale(self, loss: Loss, scale: Scalar) -> Loss:
        """Return the loss in float32 times the scale.

        Args:
            loss: Floating scalar tensor of any dtype.
            scale: Python float, or a float32 scalar on the device.
        """

    def watch_backward(self, loss: Loss, scaled: Loss) -> Callable[[], bool | None]:
        """Return a function that returns through which of the two a backward went. Needed for `sees_backward`.

        It is asked for until the first step that shows what the script does: it may cost what no other step pays.

        Args:
            loss: What the user passed to `scale_loss`.
            scaled: What `scale` made of it.

        Returns:
            A function without arguments, which holds both. It returns True where a backward went through `scaled`,
            False where one went through `loss` and none through `scaled`, and None where neither did.
        """
        self.refuse("seeing on which loss backward is called")

    def check_plan(self, plan: CastPlan) -> CastPlan:
        """Check a plan without side effects; the result is what the other verbs receive.

        By default, entries `"module:name"` of deny are forced into float32 where `Forcing` is offered.

        Raises:
            UnsupportedOpError: An entry of allow or deny cannot be honoured.
            UnsupportedByBackendError: There are entries and op lists are not supported at all.
        """
        forces = Forcing.name in self.offers
        patterns = tuple(module_patterns(plan.deny)) if forces else ()
        if plan.allow or len(patterns) < len(plan.deny):
            modules = ", beyond 'module:name' in deny" if forces else ""
            self.refuse(f"op lists (allow and deny{modules})")
        return replace(plan, float32_modules=patterns)

    def activate(self, plan: CastPlan) -> None:
        """Switch casting on for the process (or thread, where the framework keeps it by thread)."""
        self.refuse("process-wide casting")

    def deactivate(self, plan: CastPlan) -> None:
        """Undo `activate`, also one that an exception interrupted: leave the framework as it was.

        It comes again at the end of a region in which the session was shut down: the region may have put casting back.
        """
        self.refuse("process-wide casting")

    def enter_thread(self, plan: CastPlan) -> None:
        """Switch casting on in the calling thread, where the framework keeps it by thread.

        It comes again at the end of a region in which `init` was called: the region may have put back the casting of
        the session before.
        """
        self.activate(plan)

    def widest(self, tree: Tree, at_least: Dtype) -> Dtype:
        """Return the widest dtype among the floating leaves of a tree: float32 if any has it."""
        self.refuse("promote_function")

    def smallest(self, scales: Sequence[Scalar]) -> Scalar:
        """Return the smallest of some scales."""
        return min(scales)

    @abc.abstractmethod
    def wrap_optimizer(self, optimizer: Optimizer, member: Member, options: Mapping[str, Any]) -> Any:
        """Return the `WrappedOptimizer` that replaces the user's optimizer (or see `state_handle`).

        Args:
            optimizer: The raw optimizer; never modified by a call that raises.
            member: Its place in the protocol.
            options: `plan`, `level`, `session` (the `Amp` that wraps; an optimizer may outlive it),
                `max_grad_norm`, `max_grad_value`, and what else the user passed.

        Where another optimizer of the same list is refused later, `WrappedOptimizer.ampx_unwrap` is called.

        Raises:
            InvalidOptionError: An option is not known to this backend.
            LowPrecisionParametersError: Parameters are float16 or bfloat16 and have no master weights.
            AlreadyWrappedError: It is wrapped, where that is no `WrappedOptimizer`.
        """

    def state_handle(self, state: Any, call: str) -> Handle | None:
        """Return the handle of an optimizer state that holds the loss scale; None where optimizers are objects.

        Required exactly where optimizer states are values that the user carries. What `wrap_optimizer` returns there is
        no `WrappedOptimizer` but an optimizer whose states carry what `member.group` has: `config`, `enabled` and
        `index`.

        Args:
            state: What the user passed instead of a wrapped optimizer: the state, or anything that holds it.
            call: The function that it was passed to, for messages; None was passed to `state_dict` and
                `load_state_dict` where they got no optimizer.

        Raises:
            NotWrappedError: It holds no loss scale.
            UnsupportedByBackendError: It holds several, or the call needs a state and got None.

        Sync: one, unless traced.
        """
        return None

    def prepare(self, model: Any, optimizer: Optimizer | None, plan: CastPlan) -> Any:
        """Do to a model (and optimizer) what the level needs; in place where the framework can.

        By default O1 needs nothing, but the modules that the plan forces (see `check_plan`) must be there.

        Returns:
            The model, or the pair (model, optimizer) where an optimizer was given.

        Raises:
            UnsupportedOpError: A pattern of allow or deny matches no module.
        """
        if plan.level in ("O2", "O3"):
            self.refuse("prepare (levels O2 and O3)")
        if plan.float32_modules:
            with offer(self, Forcing).force(model, dict.fromkeys(plan.float32_modules, "float32")):
                pass
        return model if optimizer is None else (model, optimizer)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        """List (name, non-finite elements, elements) of parameters with non-finite gradients. Sync: one."""
        self.refuse("naming parameters with non-finite gradients")

    def refuse(self, capability: str) -> NoReturn:
        """Raise for a call that needs a capability which is not declared, or a contract which is not offered."""
        declared = [*sorted(name for name, value in vars(self.capabilities).items() if value is True), *self.offers]
        raise UnsupportedByBackendError(
            f"backend {self.name!r} does not support {capability}; it declares: "
            f"{', '.join(declared) or 'no optional capability'}. Leave the call out, or use another framework."
        )


class Contract(abc.ABC):
    """What one feature needs of a framework, beside `Backend`: offered by name, and loaded on first use.

    Abstract in the feature, final in plugins; holds no state but the backend that offers it.

    Attributes:
        name: Its key in `Backend.offers`.
        feature: What is not supported where it is absent.
    """

    name: ClassVar[str]
    feature: ClassVar[str]

    def __init__(self, backend: Backend) -> None:
        self.backend = backend


class Forcing(Contract):
    """The part of `Probe` that computes modules in a dtype: for `"module:name"` in deny, where no other way is."""

    name: ClassVar[str] = "probe"
    feature: ClassVar[str] = "forcing modules into a dtype"

    @abc.abstractmethod
    def force(self, model: Any | None, dtypes: Mapping[str, str]) -> AbstractContextManager[Any]:
        """Return a region in which named modules compute in a dtype of their own, forward and backward.

        Their floating inputs are cast to it, and casting is off inside where it is float32, on where it is low. A
        module inside another obeys its own entry; what such a module returns has the dtype that it computed, unless
        casting is off around it and the framework does not mix dtypes: then it has that of its inputs. In a dtype of
        `Probe.simulates`, inputs, outputs and the gradients of outputs are rounded to that dtype, and kept in
        the one they have. What `ampx.formats.digits_of` names rounds alike, in float32's range.

        Args:
            model: The model, or the parameters where these are a value (JAX); None for every model that this process
                calls inside the region, named as `Probe.watch` does.
            dtypes: By pattern (`fnmatch`) of names of modules, the dtype; the last pattern that matches holds.

        Raises:
            UnsupportedOpError: A pattern matches no module; known at once where the model is passed, else not at all.
            UnsupportedDtypeError: It can neither compute in a dtype nor simulate it.
        """


# The contracts that a backend can offer, by name. Each is defined beside the feature that uses it; core imports none.
CONTRACTS: Final[Mapping[str, str]] = {
    "probe": "ampx.numerics.probe:Probe",
    "converter": "ampx.shipping.converter:Converter",
    "automation": "ampx.run:Automation",
    "demo": "ampx.cli.demo:Demo",
}


def are_offers(offers: object) -> bool:
    """Return whether a backend may have these `offers`; what is named in them is not imported."""
    return isinstance(offers, Mapping) and all(
        name in CONTRACTS and (":" in place if isinstance(place, str) else isinstance(place, type))
        for name, place in offers.items()
    )


# A contract is passed as a function of a backend, which its class is: mypy takes no abstract class as a `type`.
Offered = TypeVar("Offered", bound=Contract)


def find_offer(backend: Backend, contract: Callable[[Backend], Offered]) -> Offered | None:
    """Return what a backend offers to a feature, importing it where that is new; None where it offers nothing.

    Raises:
        BackendLoadError: What it names is no class that fulfils the contract.
    """
    try:
        return _find(backend, contract)
    except MissingPartError:
        return None


def offer(backend: Backend, contract: Callable[[Backend], Offered]) -> Offered:
    """Return what a backend offers to a feature, importing it where that is new.

    Raises:
        UnsupportedByBackendError: It offers nothing.
        MissingPartError: The room of what it offers was taken out.
        BackendLoadError: What it names is no class that fulfils the contract.
    """
    offered = _find(backend, contract)
    return backend.refuse(cast("type[Offered]", contract).feature) if offered is None else offered


def _find(backend: Backend, contract: Callable[[Backend], Offered]) -> Offered | None:
    wanted = cast("type[Offered]", contract)
    place = backend.offers.get(wanted.name)
    kind = _load(place, f"{wanted.feature} of backend {backend.name!r}") if isinstance(place, str) else place
    if kind is None:
        return None
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing or not (isinstance(kind, type) and issubclass(kind, wanted)):
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise BackendLoadError(
            f"backend {backend.name!r} offers {place!r} as {wanted.name!r}{lacks}; accepted: 'module:class', of a "
            f"class that is derived from {wanted.__module__}.{wanted.__name__} and writes all of its methods. "
            f"Correct the plugin."
        )
    return kind(backend)


def _load(place: str, by: str) -> Any:
    """Import a class; None where the plugin's own module is not there."""
    module, _, name = place.partition(":")
    try:
        return getattr(import_part(module, by), name, place)
    except MissingPartError:
        raise
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == module.partition(".")[0]:
            return None
        raise


class GenericBackend(Backend):
    """A backend whose optimizers ampx itself steps, by these methods."""

    @abc.abstractmethod
    def unscale(self, grads: Grads, scale: Scalar) -> Unscaled:
        """Divide gradients by the scale and test them for inf and NaN, in one pass.

        Args:
            grads: What `gradients` gave, which is modified in place, or what the user passed to `step`, which may be.
            scale: Python float, or a float32 scalar on the device.

        Returns:
            The unscaled gradients with unchanged dtypes, and their finiteness.

        Sync: at most one.
        """

    @abc.abstractmethod
    def apply(self, optimizer: Optimizer, grads: Grads) -> None:
        """Run the framework's own update with unscaled, finite gradients. Sync: as the framework."""

    def gradients(self, optimizer: Optimizer) -> Grads:
        """Return the gradients that the optimizer would apply; empty where there are none.

        Required exactly where `capabilities.gradients == "implicit"`.
        """
        self.refuse("implicit gradients")

    def zero_gradients(self, optimizer: Optimizer) -> None:
        """Forget the gradients that hang on the parameters. Required where they are implicit."""
        self.refuse("implicit gradients")

    def clip(self, grads: Grads, max_norm: float | None, max_value: float | None) -> tuple[Grads, Scalar]:
        """Clip unscaled gradients by value, then by global L2 norm.

        Declared as `capabilities.clipping`. A backend whose wrapper clips by itself leaves it out. Gradients that
        hang on parameters are modified in place. The squares of finite gradients may overflow float32: they are added
        up in float64.

        Returns:
            The clipped gradients, and the norm before clipping by norm (None where `max_norm` is None).
        """
        self.refuse("gradient clipping")

    def wrap_optimizer(self, optimizer: Optimizer, member: Member, options: Mapping[str, Any]) -> Any:
        """Return None, for a `GenericOptimizer`, or one derived from it."""
        reject_unknown(self.name, options, ())


OPTIONS: frozenset[str] = frozenset({"plan", "level", "session", "max_grad_norm", "max_grad_value"})


def reject_unknown(backend: str, options: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise for options of `wrap_optimizer` that a backend does not know.

    Raises:
        InvalidOptionError: There is one.
    """
    choices = OPTIONS | set(accepted)
    unknown = sorted(set(options) - choices)
    if unknown:
        raise InvalidOptionError(
            f"wrap_optimizer got {', '.join(unknown)}, which backend {backend!r} does not know; accepted: "
            f"loss_scale, {', '.join(sorted(choices - {'plan', 'level', 'session'}))}. Remove or correct it."
        )


# What an entry of allow or deny begins with that names modules.
MODULE: Final = "module:"


def is_module(entry: Any) -> bool:
    """Return whether an entry of allow or deny names modules: `"module:pattern"`."""
    return isinstance(entry, str) and entry.startswith(MODULE)


def module_patterns(entries: Iterable[Any]) -> list[str]:
    """Return the patterns of names of modules among entries of allow or deny."""
    return [entry.removeprefix(MODULE) for entry in entries if is_module(entry)]


def prepare_line(entries: Iterable[Any], prepare_finds_modules: bool) -> tuple[str, ...]:
    """Return the line of code by which entries of allow or deny find their modules at O1; none where none is needed."""
    return ("model = amp.prepare(model)",) if prepare_finds_modules and any(map(is_module, entries)) else ()


def map_leaves(tree: Tree, function: Callable[[Any], Any]) -> Tree:
    """Return a tree of the same types, with what a function returns for each leaf of its tuples, lists and dicts."""
    if isinstance(tree, Mapping):
        kind: Any = type(tree)
        return kind({key: map_leaves(value, function) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        values = [map_leaves(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)


def leaves(tree: Tree) -> Iterator[Any]:
    """Walk over the leaves of tuples, lists and dicts."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def choose_device(name: str, framework: str, kind: str, count: int) -> int | None:
    """Return the number of the accelerator that a name means, -1 for any of that kind; None for the CPU.

    Args:
        name: `"auto"` for the best present, `"cpu"`, or the kind, with a number if wanted (`"gpu:1"`).
        framework: As users call it, for the message.
        kind: What it calls its accelerators: `"cuda"` or `"gpu"`.
        count: How many are present.

    Raises:
        UnsupportedDeviceError: There is no such device here.
    """
    wanted, _, number = (kind if count else "cpu", "", "") if name == "auto" else str(name).partition(":")
    if wanted == "cpu" and not number:
        return None
    if wanted == kind and (not number or number.isdigit()) and int(number or 0) < count:
        return int(number or -1)
    present = ["cpu", *([kind] if count else []), *(f"{kind}:{each}" for each in range(count))]
    raise UnsupportedDeviceError(
        f"device={name!r} is not a device that {framework} offers here; accepted: 'auto', "
        f"{', '.join(map(repr, present))}. Pass one of these"
        f"{'' if count else f', or install a CUDA build of {framework}'}."
    )


def cpu_flags() -> frozenset[str]:
    """Return the CPU's instruction sets by Linux's names; nothing on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
