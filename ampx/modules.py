"""The modules of a model, as `prepare` gets it: their names, patterns of these, and interceptors of their calls."""

from __future__ import annotations

import gc
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias

from .backend import CastPlan, module_patterns
from .callers import values_in_sight
from .errors import InvalidOptionError, UnsupportedOpError

# The order of interceptors, from the outside to the inside: what rounds the gradients of outputs, where a framework has
# no other way to round them before they are watched; what watches; what forces.
Rank: TypeAlias = Literal[0, 1, 2]
GRADIENTS: Final = 0
WATCHERS: Final = 1
FORCES: Final = 2
# So many names are shown in a message.
_SHOWN: Final = 8
# Returns whether a name matches a pattern.
Matches: TypeAlias = Callable[[str, str], bool]


# -- arguments ---------------------------------------------------------------------------------------------------------


def listed(values: Any, kinds: type | tuple[type, ...], role: str, accepted: str) -> list[Any]:
    """List what `prepare` got as the model or the optimizer: one of some kinds, a list of them, or None.

    Raises:
        InvalidOptionError: Something is of another kind.
    """
    several = list(values) if isinstance(values, (list, tuple)) else [] if values is None else [values]
    for value in several:
        if not isinstance(value, kinds):
            raise InvalidOptionError(
                f"prepare got {type(value).__name__} as the {role}; accepted: {accepted}, or a list of them. Pass that."
            )
    return several


# -- names -------------------------------------------------------------------------------------------------------------


class Name(str):
    """A name that a module had when it was called.

    Attributes:
        later: The name that it has got since within a larger model; None for none.
    """

    later: Name | None = None


class Names:
    """The names of modules: within a model, or within the models that are called.

    A model is the outermost module that is called. What the script reaches through a larger one only
    (`model.encoder(x)`) is named within that. Of several models the first has plain names. Those of another begin with
    its class (`"Net:fc"`), and where that is taken with its class and a number (`"Net#2:fc"`).

    Where a model was called before a larger one that it belongs to, its modules have their names within the larger one
    from then on, and mean the same by their former names. A part of two models, of which neither has the other, keeps
    its name within the first that was called.
    """

    def __init__(
        self,
        model: Any | None,
        named: Callable[[Any], Iterable[tuple[str, Any]]],
        added: Callable[[list[tuple[Name, Any]]], Any] = lambda modules: None,
        kinds: tuple[type, ...] = (),
    ) -> None:
        """Name the modules of a model; without one, name modules as they are called.

        Args:
            model: The model, or None.
            named: Lists the modules in a module with their names, itself (or what it wraps) included as "".
            added: Is called with what has got names, new ones or others, and these.
            kinds: The framework's classes of modules, of which the script's variables hold larger models.
        """
        self._named, self._added, self._kinds = named, added, kinds
        self._names: dict[int, tuple[Name, ...]] = {}  # of each module, the present one first
        self._kept: list[Any] = []  # so that a number stays that of the same module
        self._open = model is None
        self._roots: dict[str, int] = {}  # by prefix, the outermost module that is called
        if model is not None:
            self.add(model, "")

    def of(self, module: Any) -> Name | None:
        """Return the name of a module that is called; None where it is not part of the model."""
        return next(iter(self._names.get(id(module)) or self._arrived(module)), None)

    def dtype(self, module: Any, dtype_of: Callable[[str], str | None]) -> str | None:
        """Return the dtype of a module that is called, by its name or else a former one; None where none has one."""
        for name in self._names.get(id(module)) or self._arrived(module):
            dtype = dtype_of(name)
            if dtype is not None:
                return dtype
        return None

    def __iter__(self) -> Iterator[str]:
        """Walk over all names so far."""
        return iter(dict.fromkeys(names[0] for names in self._names.values()))

    def _arrived(self, module: Any) -> tuple[Name, ...]:
        """Name the modules of a model that is called for the first time, or of which a module is."""
        if not self._open:
            return ()
        model = self._model_of(module)
        named = list(self._named(model))
        parts = {id(part) for _, part in named}
        root = next((part for name, part in named if not name), model)
        taken = [prefix for prefix, part in self._roots.items() if part in parts]
        for prefix in taken:
            del self._roots[prefix]
        prefix = "" if "" in taken else self._free_prefix(type(root).__name__)
        self._roots[prefix] = id(root)
        self.add(model, prefix, taken)
        return self._names.get(id(module)) or (self.add(module, prefix),)

    def _model_of(self, module: Any) -> Any:
        """Return the largest module in the script's variables that has a module, if no variable holds it itself."""
        largest, size = module, 0
        for value in values_in_sight(self._kinds) if self._kinds else ():
            if value is module:
                return module
            parts = {id(part) for _, part in self._named(value)}
            if id(module) in parts and len(parts) > size:
                largest, size = value, len(parts)
        return largest

    def add(self, root: Any, prefix: str, taken: Collection[str] = ()) -> Name:
        """Name the modules in a module that have no name yet, or one with a prefix that is taken; return its own."""
        new, seen = [], set()
        for name, part in self._named(root):
            former = self._names.get(id(part))
            is_free = former is None or (former[0] != prefix + name and _model_prefix(former[0]) in taken)
            if is_free and id(part) not in seen:
                new.append((self._keep(part, prefix + name), part))
            seen.add(id(part))
        if id(root) not in self._names:  # it wraps what has its name
            self._keep(root, prefix)
        self._added(new)
        return self._names[id(root)][0]

    def _keep(self, module: Any, text: str) -> Name:
        former, name = self._names.pop(id(module), ()), Name(text)
        for earlier in former[:1]:
            earlier.later = name
        self._kept.append(module)
        self._names[id(module)] = name, *former
        return name

    def _free_prefix(self, kind: str) -> str:
        prefix, count = f"{kind}:" if self._roots else "", 1
        while prefix in self._roots:
            count += 1
            prefix = f"{kind}#{count}:"
        return prefix

    def check(self, patterns: Iterable[str], call: str) -> None:
        """Raise for a pattern that matches no module, where the model is known.

        Raises:
            UnsupportedOpError: There is one.
        """
        if not self._open:
            check_patterns(call, patterns, list(self))


def present_name(name: str) -> str:
    """Return the name that a module has now, as a plain string."""
    while isinstance(name, Name) and name.later is not None:
        name = name.later
    return str(name)


def _model_prefix(name: str) -> str:
    """Return what the names of a model's modules begin with."""
    return "".join(name.rpartition(":")[:2])


def outer_name(name: str) -> str | None:
    """Return the name of the module around another; None for the outermost."""
    if "." in name:
        return name.rpartition(".")[0]
    prefix, colon, _ = name.rpartition(":")
    return None if name == prefix + colon else prefix + colon


def owner_of(parameter: str, modules: Iterable[str]) -> str:
    """Return the innermost of some modules whose name is part of a parameter's, from the right; "" for none.

    Frameworks put other marks between names, and the name of the model, or of its class, in front.
    """
    parts = {module: _parts(module) for module in modules if module}
    path = _parts(parameter)[:-1]
    for end in range(len(path), 0, -1):
        owners = [module for module, own in parts.items() if path[max(0, end - len(own)) : end] == own]
        if owners:
            return max(owners, key=len)
    return ""


def _parts(name: str) -> list[str]:
    return re.findall(r"[^][./:']+", name)


def name_parameters(
    parameters: Iterable[Any], kind: type, parts: str, plain: Callable[[str], str] = str
) -> dict[int, str]:
    """Return, by id, the names that parameters have in the outermost models that live; none for what no model holds.

    Where two models have the same names, the model's class goes in front, and what is ambiguous still has no name.

    Args:
        parameters: Of one or more optimizers.
        kind: The framework's class of modules.
        parts: The attribute in which a module holds those in it, by name.
        plain: Returns a name without what wrappers add.
    """
    # By type: asking an object for its class may wake what stands in for another.
    modules = [entry for entry in gc.get_objects() if issubclass(type(entry), kind)]
    inner = {id(child) for module in modules for child in vars(module).get(parts, {}).values()}
    wanted = set(map(id, parameters))
    seen: dict[int, tuple[str, str]] = {}
    for root in modules:
        if id(root) in inner or parts not in vars(root):
            continue
        for name, parameter in root.named_parameters():
            if id(parameter) in wanted:
                seen.setdefault(id(parameter), (plain(name), f"{type(root).__name__}.{plain(name)}"))
    for names in zip(*seen.values(), strict=True):
        if len(set(names)) == len(names):
            return dict(zip(seen, names, strict=True))
    return {}


def distinct_names(named: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return the names of objects by id; of several with one name, all but the first get a number."""
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for name, owner in named:
        if id(owner) not in names:
            counts[name] += 1
            names[id(owner)] = name if counts[name] == 1 else f"{name}#{counts[name]}"
    return names


# -- patterns ----------------------------------------------------------------------------------------------------------


def unmatched(patterns: Iterable[str], names: Collection[str], matches: Matches = fnmatchcase) -> list[str]:
    """Return the patterns that match none of some names."""
    return [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]


def is_meant(name: str, pattern: str) -> bool:
    """Return whether a pattern of `allow` or `deny` means a module: in every model, unless it begins with a class."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(":")[2], pattern)


def some_names(names: Sequence[str]) -> str:
    """Return the first of some names, for a message."""
    return f"{', '.join(names[:_SHOWN]) or 'none'}{', …' if len(names) > _SHOWN else ''}"


def check_patterns(
    call: str,
    patterns: Iterable[str],
    names: Sequence[str],
    advice: str = "Correct it.",
    matches: Matches = fnmatchcase,
) -> None:
    """Raise for a pattern that matches none of the names of a model's modules.

    Raises:
        UnsupportedOpError: There is one.
    """
    for pattern in unmatched(patterns, names, matches):
        raise UnsupportedOpError(
            f"{call} got the pattern {pattern!r}, which matches no module of the model; accepted: patterns of "
            f"names such as {some_names([*map(repr, names)])}. {advice}"
        )


def last_match(name: str, dtypes: Mapping[str, str], matches: Matches = fnmatchcase) -> str | None:
    """Return what the last pattern that matches a name stands for; None where none matches."""
    return next((dtypes[pattern] for pattern in reversed(list(dtypes)) if matches(name, pattern)), None)


def inherited(name: str, dtype_of: Callable[[str], str | None]) -> str | None:
    """Return the dtype of a module: its own, or that of the innermost module around it that has one."""
    own, outer = dtype_of(name), outer_name(name)
    return own if own is not None or outer is None else inherited(outer, dtype_of)


def forced_dtype(name: str, dtypes: Mapping[str, str]) -> str | None:
    """Return the dtype that patterns give a module, or else the innermost module around it that has one."""
    return inherited(name, lambda own: last_match(own, dtypes))


def module_dtypes(plan: CastPlan) -> dict[str, str]:
    """Return the dtype of each pattern of modules in a plan, for `last_match`: deny outdoes allow."""
    denied = dict.fromkeys(module_patterns(plan.deny), "float32")
    allowed = [pattern for pattern in module_patterns(plan.allow) if pattern not in denied]
    return {**dict.fromkeys(allowed, str(plan.dtype)), **denied}


def name_models(models: Iterable[Any], named: Callable[[Any], Iterable[tuple[str, Any]]]) -> list[tuple[Name, Any]]:
    """List the modules of some models, with the names that they get where these are called one after the other."""
    modules: list[tuple[Name, Any]] = []
    names = Names(None, named, modules.extend)
    for model in models:
        names.of(model)
    return modules


def float32_modules(named: Iterable[tuple[str, Any]], plan: CastPlan, norms: tuple[type, ...]) -> list[Any]:
    """List the modules that stay in float32 where others become low: what is denied, and norms that are not allowed."""
    dtypes, kept = module_dtypes(plan), []
    for name, module in named:
        dtype = inherited(name, lambda own: last_match(own, dtypes, is_meant))
        if dtype == "float32" or (dtype is None and isinstance(module, norms)):
            kept.append(module)
    return kept


# -- calls -------------------------------------------------------------------------------------------------------------


class Interceptor(Protocol):
    """An interceptor of module calls."""

    def call(self, module: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the call of a module returns, by calling `forward`."""


class CallInterceptors:
    """Interceptors of the calls of a framework's modules, in all threads.

    Watchers stand outside of what forces modules, so that they see what it made of their outputs.
    """

    def __init__(self, install: Callable[[], None], uninstall: Callable[[], None]) -> None:
        """Start without any.

        Args:
            install: Has calls of modules go through `run`; called when the first comes.
            uninstall: Undoes it; called when the last has gone.
        """
        self._install, self._uninstall = install, uninstall
        self._installed = False
        self._entries: tuple[tuple[Rank, Interceptor], ...] = ()
        self._lock = threading.Lock()

    @contextmanager
    def around(self, *entries: tuple[Rank, Interceptor]) -> Iterator[None]:
        """Return a region with interceptors; of one rank, the last stands innermost."""
        self._change(lambda: self._entries + entries)
        try:
            yield
        finally:
            self._change(lambda: tuple(entry for entry in self._entries if entry not in entries))

    def _change(self, change: Callable[[], tuple[tuple[Rank, Interceptor], ...]]) -> None:
        with self._lock:
            self._entries = tuple(sorted(change(), key=lambda entry: entry[0]))
            if bool(self._entries) is not self._installed:
                (self._install if self._entries else self._uninstall)()
                self._installed = bool(self._entries)

    def run(self, module: Any, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Call a module."""
        for _, entry in reversed(self._entries):
            forward = partial(_intercepted, entry, module, forward)
        return forward(*inputs, **options)


def _intercepted(entry: Interceptor, module: Any, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return entry.call(module, forward, inputs, options)
