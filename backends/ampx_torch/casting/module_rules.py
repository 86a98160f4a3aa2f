"""Rules about modules: casting off (deny) or on (allow) while a module's forward runs.

Hooks do it. A rule about a class needs nothing but the session: hooks common to all modules look for it. A rule
about names needs `prepare`, which puts hooks on the modules it finds; these see keyword arguments too.

While rules about classes are in force, `torch.compile(module)` warns that there are hooks common to all modules;
ours do nothing a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from ampx.backend import CastPlan
from ampx.errors import UnsupportedOpError
from ampx.modules import Names, is_meant, some_names
from ampx_torch.trees import cast, floating

from .oplists import Kind, TorchPlan

# What wrappers put in front of the names of the modules they wrap.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})


class _Scopes(threading.local):
    """The ruled modules whose forward runs in this thread, outermost first: (module, kind, autocast before)."""

    stack: tuple[tuple[nn.Module, Kind, bool], ...] = ()


class _Rules:
    """The module rules in force, and what undoes them."""

    def __init__(self) -> None:
        self.plan: TorchPlan | None = None
        self.handles: list[Any] = []
        self.fast_path: bool | None = None


_scopes = _Scopes()
_rules = _Rules()


def reset_thread() -> None:
    """Forget scopes that an interrupt left behind in this thread."""
    _scopes.stack = ()


def install(plan: TorchPlan) -> None:
    """Put the rules in force."""
    _rules.plan = plan
    if plan.modules:
        # torch's fast path for inference computes a whole transformer layer without calling its modules.
        _rules.fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
    if plan.classes:
        leave = torch_module.register_module_forward_hook(LeaveAny(), with_kwargs=True, always_call=True)
        enter: Any = EnterAny()  # torch types a hook as giving nothing
        _rules.handles += [torch_module.register_module_forward_pre_hook(enter), leave]


def uninstall() -> None:
    """Take all hooks away."""
    for handle in _rules.handles:
        handle.remove()
        # torch 2.13 removes such a hook but not the note about its keyword arguments.
        torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
    _rules.handles.clear()
    if _rules.fast_path is not None:
        torch.backends.mha.set_fastpath_enabled(_rules.fast_path)
    _rules.plan = _rules.fast_path = None


def in_force(kind: Kind, entry: object) -> bool:
    """Return whether the session has this rule: hooks travel with copies of a model into other sessions."""
    plan = _rules.plan
    return plan is not None and (kind, entry) in plan.modules


def class_rule(module: nn.Module, plan: TorchPlan) -> tuple[Kind, Any] | None:
    """Return the rule about the nearest base class of a module."""
    for base in type(module).__mro__:
        for kind, named in plan.classes:
            if named is base:
                return kind, named
    return None


def own_rule(module: nn.Module) -> tuple[Kind, Any] | None:
    """Return the rule in force that a module, or the module that it is a copy of, was given by its name."""
    rule = module.__dict__.get("_ampx_rule")
    return rule if rule is not None and in_force(*rule) else None


def _has_own_hooks(module: nn.Module) -> bool:
    return own_rule(module) is not None


# -- scopes ----------------------------------------------------------------------------------------


def _enter(module: nn.Module, kind: Kind, tensors: Any) -> Any | None:
    """Begin a scope and give the arguments it computes with, or None where autocast is off anyway."""
    plan = _rules.plan
    if plan is None:
        return None
    device = plan.device
    was_on = torch.is_autocast_enabled(device)
    # Rules are about autocast: where the user switched it off there is none. A denied module around an allowed
    # one is another matter: the inner rule wins.
    denied = bool(_scopes.stack) and _scopes.stack[-1][1] == "deny"
    if not was_on and not (denied and kind == "allow"):
        return None
    _scopes.stack = (*_scopes.stack, (module, kind, was_on))
    torch.set_autocast_enabled(device, kind == "allow")
    return cast(tensors, _target(kind, device), device)


def _leave(module: nn.Module) -> bool:
    """End the scope of a module, if one was begun; scopes inside it that an interrupt left open go too."""
    stack, plan = _scopes.stack, _rules.plan
    for position in range(len(stack) - 1, -1, -1):
        if stack[position][0] is module:
            _scopes.stack = stack[:position]
            if plan is not None:
                torch.set_autocast_enabled(plan.device, stack[position][2])
            return True
    return False


def _target(kind: Kind, device: str) -> torch.dtype:
    return torch.float32 if kind == "deny" else torch.get_autocast_dtype(device)


class EnterAny:
    """Hook before every module's forward: begins the scope of a class rule."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Cast the positional arguments."""
        plan = _rules.plan
        rule = None if plan is None or _has_own_hooks(module) else class_rule(module, plan)
        return None if rule is None else _enter(module, rule[0], args)


class LeaveAny:
    """Hook after every module's forward, also after an exception: ends the scope of a class rule."""

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Restore; after an exception torch leaves out the keyword arguments."""
        plan = _rules.plan
        if plan is None or _has_own_hooks(module):
            return
        rule = class_rule(module, plan)
        if rule is None or not _leave(module) or len(rest) < 2:
            return
        target = _target(rule[0], plan.device)
        if any(cast(tensor, target, plan.device) is not tensor for tensor in floating(rest[0])):
            raise UnsupportedOpError(
                f"{rule[0]} names {rule[1].__name__}, which was called with floating tensors as keyword arguments; "
                f"the hook for classes sees positional ones only, so they were not cast. Pass them by position, or "
                f"call ampx.prepare(model) before training."
            )


class Enter:
    """Hook before one module's forward: begins the scope of its rule. Can be copied and pickled."""

    def __init__(self, kind: Kind, entry: Any) -> None:
        self.kind = kind
        self.entry = entry

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Cast the arguments."""
        return _enter(module, self.kind, (args, kwargs)) if in_force(self.kind, self.entry) else None


class Leave:
    """Hook after one module's forward, also after an exception: ends the scope."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Restore."""
        _leave(module)


# -- prepare ---------------------------------------------------------------------------------------


def matches(models: Sequence[nn.Module], plan: CastPlan) -> dict[nn.Module, tuple[Kind, Any]]:
    """Find the modules that the rules of a plan are about; a name goes before a class."""
    if not isinstance(plan, TorchPlan):
        return {}
    named = _names(models)
    by_class = {
        module: rule for model in models for module in model.modules() if (rule := class_rule(module, plan)) is not None
    }
    by_name, hits = match_names(named, plan)
    for kind, pattern in plan.patterns:
        if pattern not in hits | plan.resolved:
            raise UnsupportedOpError(
                f"{kind} got the pattern {pattern!r}, which matches no module of the model; its modules: "
                f"{some_names([name for name, _ in named])}. Correct it; "
                f"several models go into one call: ampx.prepare([first, second]).{plan.meant(pattern)}"
            )
    _check_names(plan, {name.rpartition(":")[2] for name, _ in named})
    return {**by_class, **by_name}


def _names(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """List the modules in some models with their names, as `ampx run` names those of models that are called."""
    roots = Names(None, lambda model: {plain_name(name): part for name, part in model.named_modules()}.items())
    prefixes = [own if (own := roots.of(model) or "").endswith(":") else "" for model in models]
    pairs = zip(prefixes, models, strict=True)
    return [
        (prefix + plain_name(name), part) for prefix, model in pairs for name, part in model.named_modules() if name
    ]


def match_names(
    named: Iterable[tuple[str, nn.Module]], plan: TorchPlan
) -> tuple[dict[nn.Module, tuple[Kind, Any]], set[str]]:
    """Find the modules that the name patterns of a plan are about; return with them the patterns that match any."""
    by_name: dict[nn.Module, tuple[Kind, Any]] = {}
    hits = set()
    for name, module in named:
        for kind, pattern in plan.patterns:
            if not is_meant(name, pattern):
                continue
            hits.add(pattern)
            if by_name.setdefault(module, (kind, pattern))[0] != kind:
                raise UnsupportedOpError(
                    f"allow and deny both match the module {name!r}: by "
                    f"{by_name[module][1]!r} and {pattern!r}. Make one of them narrower."
                )
    return by_name, hits


def _check_names(plan: TorchPlan, names: set[str]) -> None:
    for entry in (*plan.allow, *plan.deny):
        if isinstance(entry, str) and entry.isidentifier() and entry in names:
            if any(entry == pattern for _, pattern in plan.patterns):
                continue
            raise UnsupportedOpError(
                f"{entry!r} names an operation of torch and a module of the model. Write 'aten::{entry}' for the "
                f"operation or 'module:{entry}' for the module."
            )


def plain_name(name: str) -> str:
    """Return a module's name without what DDP, FSDP and the compiler put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def attach(rules: dict[nn.Module, tuple[Kind, Any]]) -> dict[nn.Module, list[RemovableHandle]]:
    """Put hooks on modules, in place of those of a former call; return their handles."""
    handles = {}
    for module, (kind, entry) in rules.items():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, (Enter, Leave))]:
                del hooks[key]
        module.__dict__["_ampx_rule"] = (kind, entry)
        handles[module] = [
            module.register_forward_pre_hook(Enter(kind, entry), prepend=True, with_kwargs=True),
            module.register_forward_hook(Leave(), with_kwargs=True, always_call=True),
        ]
    return handles
