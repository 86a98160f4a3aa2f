"""The entries of `allow` and `deny`: what each means, and the kernels that honour those about operations.

Resolving is without side effects. `kernels` honours the rules about operations, `module_rules` those about
modules, `rules` puts both in force.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ampx.backend import CastPlan
from ampx.errors import UnsupportedOpError, meant

# ban: an error where a floating argument has low precision. promote: the widest dtype among the arguments.
Kind = Literal["allow", "deny", "ban", "promote"]

# Functions of torch that are written in Python and consist of one operation, with that operation.
_SAME_NAME: Final = (
    "alpha_dropout batch_norm binary_cross_entropy binary_cross_entropy_with_logits celu cosine_embedding_loss "
    "ctc_loss dropout elu embedding glu group_norm hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss "
    "instance_norm kl_div l1_loss layer_norm leaky_relu log_softmax margin_ranking_loss mish mse_loss "
    "multi_margin_loss poisson_nll_loss relu rms_norm rrelu selu silu smooth_l1_loss soft_margin_loss softmax "
    "triplet_margin_loss adaptive_avg_pool2d adaptive_avg_pool3d"
)

# Each is proved by a test: a rule for the operation must change what the function gives.
PYTHON_WRAPPERS: Final[dict[Callable[..., Any], tuple[str, ...]]] = {
    **{getattr(F, name): (name,) for name in _SAME_NAME.split()},
    F.cross_entropy: ("cross_entropy_loss",),
    F.grid_sample: ("grid_sampler",),
    F.nll_loss: ("nll_loss_nd",),
    torch.cdist: ("cdist",),
    torch.einsum: ("einsum",),
}


@dataclass(frozen=True)
class Rule:
    """What to do with an entry. Callers inside this package put rules for operations in `allow` and `deny`, too."""

    kind: Kind
    entry: Any


@dataclass(frozen=True)
class TorchPlan(CastPlan):
    """A plan whose entries are resolved."""

    operations: tuple[tuple[Kind, str], ...] = ()  # (kind, qualified overload such as `aten::softmax.int`)
    classes: tuple[tuple[Kind, type[nn.Module]], ...] = ()  # (kind, module class)
    patterns: tuple[tuple[Kind, str], ...] = ()  # (kind, pattern of module names)
    # The patterns and classes that `prepare` has looked for; grows.
    resolved: set[Any] = field(default_factory=set, compare=False)

    @property
    def modules(self) -> tuple[tuple[Kind, Any], ...]:
        """The rules about modules, by class and by name."""
        return self.classes + self.patterns

    def meant(self, pattern: object) -> str:
        """Return the end of an error message about a pattern that is almost the name of an operation."""
        return operation_meant(pattern) if pattern in (*self.allow, *self.deny) else ""


def resolve(plan: CastPlan) -> CastPlan:
    """Say what every entry of `allow` and `deny` means; raise for one that cannot be honoured."""
    if isinstance(plan, TorchPlan) or not (plan.allow or plan.deny):
        return plan
    tables: dict[str, dict[Any, Kind]] = {"operations": {}, "classes": {}, "patterns": {}}
    lists: tuple[tuple[Kind, tuple[Any, ...]], ...] = (("allow", plan.allow), ("deny", plan.deny))
    for kind, entries in lists:
        for entry in entries:
            rule = entry if isinstance(entry, Rule) else Rule(kind, entry)
            name, keys = ("operations", _overloads(rule.kind, rule.entry)) if rule is entry else _meaning(rule, plan)
            for key in keys:
                _add(tables[name], rule.kind, key, rule.entry)
    resolved: dict[str, Any] = {name: getattr(plan, name) for name in CastPlan.__dataclass_fields__}
    for name, table in tables.items():
        resolved[name] = tuple((kind, key) for key, kind in table.items())
    return TorchPlan(**resolved)


def _meaning(rule: Rule, plan: CastPlan) -> tuple[str, list[Any]]:
    """Return the table of the plan that an entry of the user belongs to, and its keys there."""
    kind, entry = rule.kind, rule.entry
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        _check_class(kind, entry, plan)
        return "classes", [entry]
    if isinstance(entry, str) and not _names_operation(entry):
        return "patterns", [_pattern(kind, entry)]
    if plan.level != "O1":
        raise _refused(kind, entry, f"level {plan.level} casts parameters, not operations", "Use level='O1'")
    return "operations", _overloads(kind, entry)


def _refused(kind: str, entry: object, why: str, remedy: str, hint: str = "") -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{kind} got {entry!r}, which cannot be honoured: {why}; accepted: functions and names of torch operations, "
        f"nn.Module classes, patterns of module names. {remedy}.{hint}"
    )


def _add(kinds: dict[Any, Kind], kind: Kind, key: object, entry: object) -> None:
    if kinds.setdefault(key, kind) != kind:
        raise _refused(kind, entry, "it is in allow and in deny", "Leave it in one of them")


def _check_class(kind: Kind, entry: type[nn.Module], plan: CastPlan) -> None:
    if entry is nn.Module:
        raise _refused(kind, entry, "it is the class of all modules", "Name the classes you mean")
    if kind == "deny" or plan.level != "O1" or not entry.__module__.startswith("torch.nn.modules."):
        return
    # Autocast leaves the modules of these files in float32 or to their inputs, so that "on" would change nothing.
    if entry.__module__.rpartition(".")[2] in ("normalization", "batchnorm", "instancenorm", "activation", "loss"):
        if entry is nn.MultiheadAttention:
            return
        raise _refused(
            kind,
            entry,
            "autocast has no low-precision rule for it, and its float32 parameters stay what they are",
            "Allow the function that it calls, such as torch.nn.functional.layer_norm",
        )


def _names_operation(entry: str) -> bool:
    if entry.startswith("module:"):
        return False
    return "::" in entry or (entry.isidentifier() and hasattr(torch.ops.aten, entry))


def _pattern(kind: Kind, entry: str) -> str:
    plain = not entry.startswith("module:")
    if plain and entry.isidentifier() and (hasattr(torch, entry) or hasattr(nn.functional, entry)):
        raise _refused(
            kind,
            entry,
            "torch has no operation of this name",
            f"Pass the function itself, or 'module:{entry}' for a module",
        )
    pattern = entry.removeprefix("module:")
    if not pattern.strip():
        raise _refused(kind, entry, "it is empty", "Name an operation or modules")
    return pattern


def _overloads(kind: Kind, entry: object) -> list[str]:
    """Return the qualified names of the overloads that an entry stands for."""
    if isinstance(entry, torch._ops.OpOverload):
        overloads = [entry]
    else:
        overloads = [getattr(packet, name) for packet in _packets(kind, entry) for name in packet.overloads()]
    overloads = list(filter(_castable, overloads))
    if not overloads:
        raise _refused(
            kind,
            entry,
            "it takes no tensor, works in place, or returns a view, so there is nothing to cast",
            "Leave it out",
        )
    return [f"{overload._schema.name}.{overload._overloadname}" for overload in overloads]


def _packets(kind: Kind, entry: object) -> list[Any]:
    if isinstance(entry, torch._ops.OpOverloadPacket):
        return [entry]
    if isinstance(entry, str):
        space, _, name = entry.rpartition("::")
        names: tuple[str, ...] = (name,)
        library = getattr(torch.ops, space or "aten")
    elif isinstance(entry, types.FunctionType):
        names, library = PYTHON_WRAPPERS.get(entry, ()), torch.ops.aten
    elif isinstance(entry, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        names, library = (entry.__name__,), torch.ops.aten
        if not _is_torch(entry):
            names = ()
    elif isinstance(entry, nn.Module):
        raise _refused(kind, entry, "it is a module, not a class", "Pass its class, or its name in the model")
    else:
        raise _refused(kind, entry, f"{type(entry).__name__} is nothing that torch casts", "Remove it")
    packets = [getattr(library, name) for name in names if hasattr(library, name)]
    if not packets:
        raise _refused(
            kind,
            entry,
            "torch has no single operation behind it",
            "Annotate it with ampx.float_function or ampx.half_function",
            operation_meant(entry),
        )
    return packets


def operation_meant(entry: object) -> str:
    """Return the end of an error message about an entry that is almost the name of an operation."""
    if not isinstance(entry, str) or entry.startswith("module:"):
        return ""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return meant(entry.removeprefix("aten::"), [name[6:] for name in names if name.startswith("aten::")])


def _is_torch(entry: Any) -> bool:
    owner = getattr(entry, "__objclass__", None) or getattr(entry, "__self__", None)
    module = getattr(entry, "__module__", None) or getattr(owner, "__module__", None) or ""
    name = getattr(owner, "__name__", "")
    return str(module).startswith("torch") or str(name).startswith("torch")


def _castable(overload: Any) -> bool:
    arguments = overload._schema.arguments
    takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return takes_tensor and all(argument.alias_info is None for argument in arguments)
