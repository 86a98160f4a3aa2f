"""A file as the rules see it: calls by full name, loss scalers, casting regions, and what happens in which order."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

from ampx.syntax.flow import Flow
from ampx.syntax.program import FUNCTIONS, Program, Reference, called_name, constant, dotted, keywords, receiver
from ampx.syntax.source import Source

Kind: TypeAlias = Literal["scaled", "backward", "unscale", "clip", "step", "update", "raw step"]

SCALERS: Final = {
    "torch.cuda.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "paddle.amp.GradScaler",
    "paddle.amp.AmpScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
}
_AUTOCAST: Final = {  # by name: the position of the dtype, and its default where that is always the same
    "torch.autocast": (1, None),
    "torch.amp.autocast": (1, None),
    "torch.amp.autocast_mode.autocast": (1, None),
    "torch.cuda.amp.autocast": (1, "float16"),
    "torch.cuda.amp.autocast_mode.autocast": (1, "float16"),
    "torch.cpu.amp.autocast": (1, "bfloat16"),
    "paddle.amp.auto_cast": (4, "float16"),
    "paddle.amp.amp_guard": (4, "float16"),
}
_CLIPS: Final = {
    *(
        f"torch.nn.utils.{module}{name}"
        for module in ("", "clip_grad.")
        for name in ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")
    ),
    *(f"paddle.nn.utils.{name}" for name in ("clip_grad_norm_", "clip_grad_value_")),
    "mxnet.gluon.utils.clip_global_norm",
    "gluon.utils.clip_global_norm",
}
_BLOCKS: Final = {  # `with amp.scale_loss(loss, optimizer) as scaled_loss:`
    "apex.amp.scale_loss": "apex",
    "apex.amp.handle.scale_loss": "apex",
    "ampx.scale_loss": "ampx",
    "mxnet.contrib.amp.scale_loss": "mxnet",
    "mxnet.contrib.amp.amp.scale_loss": "mxnet",
    "mxnet.amp.scale_loss": "mxnet",
}
_OPTIMIZERS: Final = ("torch.optim.", "paddle.optimizer.", "apex.optimizers.", "transformers.AdamW")
# That a program computes in float16 somewhere.
_FLOAT16: Final = re.compile(
    r"float16(?<!bfloat16)|\bhalf\b|\.half\(|GradScaler|mixed_float16|mixed_precision=.fp16|apex|\bfp16\b|16-mixed"
    r"|cuda\.amp\.autocast\(\)|autocast\(.cuda.\)|\bamp\.init\("
)


@dataclass(frozen=True, eq=False)
class Event:
    """A step of training, in the order of the text.

    Attributes:
        kind: What happens.
        node: The call.
        scaler: The text of the loss scaler, as `self.scaler`; "" where there is none.
        subject: The text of the optimizer, or of the loss.
    """

    kind: Kind
    node: ast.Call
    scaler: str = ""
    subject: str = ""


@dataclass(frozen=True, eq=False)
class Region:
    """Code that a framework casts.

    Attributes:
        node: The `with` statement or the function.
        call: What makes it.
        dtype: The dtype; None where the text does not say.
        device: The kind of device; None where the text does not say.
        enabled: Whether it casts; False only where the text says so.
    """

    node: ast.AST
    call: ast.Call
    dtype: str | None
    device: str | None
    enabled: bool


class Script:
    """A parsed file, and the questions that rules ask about it."""

    def __init__(self, source: Source, float16: bool = False) -> None:
        """Read a file.

        `float16` says that a file which uses this one computes in float16.
        """
        self.source = source
        self.program = Program()
        self.program.add(source)
        self.float16 = float16 or computes_float16(source.text)
        self.calls = self.program.every(ast.Call)

    @cached_property
    def flow(self) -> Flow:
        """Where values come from."""
        return Flow(self.program)

    # -- names ---------------------------------------------------------------------------------------

    def names(self, node: ast.AST) -> set[str]:
        """Return the full names that imports make of a reference; `tf` and the like are spelled out by the import."""
        return self.program.qualified(node)

    def calls_of(self, names: Iterable[str]) -> list[ast.Call]:
        """Return the calls of something with one of some full names."""
        wanted = set(names)
        return [call for call in self.calls if self.names(call.func) & wanted]

    def calls_in(self, function: ast.AST) -> list[ast.Call]:
        """Return the calls of a function's own body, or of the module's."""
        return self._by_function.get(function, [])

    def assignments_in(self, function: ast.AST) -> list[ast.Assign]:
        """Return the assignments of a function's own body, or of the module's."""
        return [assign for assign in self.program.every(ast.Assign) if self.program.function(assign) is function]

    @cached_property
    def _by_function(self) -> dict[ast.AST, list[ast.Call]]:
        calls: dict[ast.AST, list[ast.Call]] = {}
        for call in self.calls:
            calls.setdefault(self.program.function(call), []).append(call)
        return calls

    def made_by(self, node: ast.expr) -> set[str]:
        """Return the full names of what a value was made by: the calls that its name was assigned."""
        return {name for call in self.makers(node) for name in self.names(call.func)}

    def makers(self, node: ast.expr) -> list[ast.Call]:
        """Return the calls that a name was assigned, or the call itself."""
        if isinstance(node, ast.Call):
            return [node]
        origins = self.flow.origins(node)
        return [origin.value for origin in origins or () if isinstance(origin.value, ast.Call)]

    def is_optimizer(self, node: ast.expr) -> bool:
        """Return whether a value is an optimizer of a framework, as far as the text says."""
        return any(name.startswith(_OPTIMIZERS) and "lr_scheduler" not in name for name in self.made_by(node))

    # -- casting -------------------------------------------------------------------------------------

    @cached_property
    def regions(self) -> list[Region]:
        """The casting regions, in the order of the text."""
        regions = []
        for call in self.calls_of(_AUTOCAST):
            parent = self.program.parent(call)
            node: ast.AST | None = None
            if isinstance(parent, ast.withitem):
                node = self.program.parent(parent)
            elif isinstance(parent, FUNCTIONS) and call in parent.decorator_list:
                node = parent
            if node is not None:
                regions.append(self._region(node, call))
        return regions

    @cached_property
    def _regions(self) -> dict[ast.AST, Region]:
        return {region.node: region for region in self.regions}

    def _region(self, node: ast.AST, call: ast.Call) -> Region:
        name = next(iter(self.names(call.func) & set(_AUTOCAST)))
        position, default = _AUTOCAST[name]
        options = keywords(call)
        device: str | None = "cuda" if ".cuda." in name else None
        kind = constant(call.args[0] if call.args else options.get("device_type"))
        if default is None and isinstance(kind, str):
            device = kind.partition(":")[0]
            default = {"cuda": "float16", "cpu": "bfloat16"}.get(device)
        explicit = options.get("dtype") or (call.args[position] if len(call.args) > position else None)
        dtype = dtype_of(explicit) if explicit is not None else default
        first = call.args[0] if call.args and name.startswith("paddle.") else None
        enabled = constant(options.get("enabled", options.get("enable", first))) is not False
        return Region(node, call, None if None in options else dtype, device, enabled)

    def region(self, node: ast.AST) -> Region | None:
        """Return the innermost casting region around a node, in its own function."""
        for outer in self.program.around(node) if self._regions else ():
            if outer in self._regions:
                return self._regions[outer]
            if isinstance(outer, (*FUNCTIONS, ast.Lambda)):
                return None
        return None

    # -- order ---------------------------------------------------------------------------------------

    def is_before(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether a node stands before another one in the text."""
        return self.program.order(first) < self.program.order(second)

    def excludes(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether two nodes stand in different branches of an `if`."""
        others = self.program.branches(second)
        return any(others.get(test, holds) is not holds for test, holds in self.program.branches(first).items())

    def comes_before(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether a node stands before another one in the text, and may be reached before it."""
        return self.is_before(first, second) and not self.excludes(first, second)

    def implies(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether the second is reached wherever the first is, as far as `if` and loops say."""
        around = self.program.branches(first)
        loops = self.program.loops(first)
        return all(around.get(test) is holds for test, holds in self.program.branches(second).items()) and all(
            loop in loops for loop in self.program.loops(second)
        )

    def same_pass(self, first: ast.AST, second: ast.AST) -> bool:
        """Return whether two nodes belong to the same pass of the same loop."""
        return self.program.loops(first) == self.program.loops(second)

    @cached_property
    def scalers(self) -> dict[str, ast.Call | None]:
        """The texts of loss scalers, with the call that makes each; None where it comes from elsewhere."""
        scalers: dict[str, ast.Call | None] = {}
        for call in self.calls_of(SCALERS):
            statement = self.program.statement(call)
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in targets:
                text = dotted(target)
                if text is not None:
                    scalers[text] = call
        for loss in self._backward_losses():  # `scaler.scale(loss).backward()` is nothing else
            text = _scaler_of(loss)
            if text is not None:
                scalers.setdefault(text, None)
        return scalers

    def _backward_losses(self) -> Iterator[ast.expr | None]:
        """Yield what `backward` is called of, and what a name of that was assigned in the same function."""
        backward = [call for call in self.calls if called_name(call) == "backward"]
        yield from map(receiver, backward)
        names = {(self.program.function(call), dotted(receiver(call))) for call in backward}
        for assign in self.program.every(ast.Assign) if names else ():
            if any((self.program.function(assign), dotted(target)) in names for target in assign.targets):
                yield assign.value

    @cached_property
    def events(self) -> dict[ast.AST, list[Event]]:
        """What training does, by function, in the order of the text."""
        scaled = self._scaled_names()
        return {
            function: [event for call in calls if (event := self._event(call, scaled)) is not None]
            for function, calls in self._by_function.items()
        }

    def _scaled_names(self) -> dict[tuple[ast.AST, str], str]:
        """Return which names of a function hold a scaled loss, and the scaler."""
        names: dict[tuple[ast.AST, str], str] = {}
        for assign in self.program.every(ast.Assign):
            scaler = _scaler_of(assign.value)
            for target in assign.targets if scaler in self.scalers else ():
                names[self.program.function(assign), dotted(target) or ""] = str(scaler)
        for region, call, kind in self.blocks:
            for item in region.items:
                name = dotted(item.optional_vars)
                if item.context_expr is call and name:
                    names[self.program.function(region), name] = f"{kind}.scale_loss"
        return names

    def _event(self, call: ast.Call, scaled: dict[tuple[ast.AST, str], str]) -> Event | None:
        if self.names(call.func) & _CLIPS:
            return Event("clip", call)
        holder = receiver(call)
        return None if holder is None else self._method(call, holder, scaled)

    def _method(self, call: ast.Call, holder: ast.expr, scaled: dict[tuple[ast.AST, str], str]) -> Event | None:
        owner, argument = dotted(holder) or "", dotted(next(iter(call.args), None)) or ""
        match called_name(call):
            case "backward":
                return self._backward(call, holder, scaled)
            case "unscale_":
                return Event("unscale", call, owner, argument)
            case "unscale":
                return Event("unscale", call, "", argument or owner)
            case "step" | "minimize" if call.args:
                return Event("step", call, owner, argument) if owner in self.scalers else None
            case "update" if owner in self.scalers:
                return Event("update", call, owner)
            case "step" if owner and self.is_optimizer(holder):
                return Event("raw step", call, "", owner)
        return None

    def _backward(self, call: ast.Call, holder: ast.expr, scaled: dict[tuple[ast.AST, str], str]) -> Event | None:
        owner = dotted(holder) or ""
        scaler = _scaler_of(holder) or scaled.get((self.program.function(call), owner))
        if scaler is not None:
            return Event("scaled", call, scaler, owner)
        return None if call.args else Event("backward", call, "", owner)

    @cached_property
    def blocks(self) -> list[tuple[ast.With, ast.Call, str]]:
        """The blocks `with amp.scale_loss(...)`, with the call and whose it is."""
        blocks = []
        for call in self.calls:
            item = self.program.parent(call)
            region = self.program.parent(item) if isinstance(item, ast.withitem) else None
            if isinstance(region, ast.With):
                kinds = {_BLOCKS[name] for name in self.names(call.func) & _BLOCKS.keys()}
                if kinds or self._is_of_session(call):
                    blocks.append((region, call, next(iter(kinds), "ampx")))
        return blocks

    def _is_of_session(self, call: ast.Call) -> bool:
        """Return whether a call is `amp.scale_loss(...)` of what `ampx.init` returned."""
        session = receiver(call) if called_name(call) == "scale_loss" else None
        return session is not None and "ampx.init" in self.made_by(session)

    def leaves(self, text: str, into: Callable[[str], bool] = lambda function: True) -> bool:
        """Return whether a name's value goes where this file does not show: returned, kept, or passed to a function.

        `into` says of a function's name whether it counts.
        """
        last = text.rpartition(".")[2]
        references: list[Reference] = [*self.program.every(ast.Name), *self.program.every(ast.Attribute)]
        for node in references:
            if dotted(node) != text or not isinstance(node.ctx, ast.Load):
                continue
            parent = self.program.parent(node)
            if isinstance(parent, (ast.Return, ast.Yield, ast.Dict, ast.List, ast.Tuple)):
                return True
            if isinstance(parent, ast.Assign) and parent.value is node:
                return True
            call = self.program.receiving_call(node)
            if call is not None and into(called_name(call)):
                return True
        return last != text and any(
            attribute.attr == last and dotted(attribute) != text for attribute in self.program.every(ast.Attribute)
        )


def computes_float16(text: str) -> bool:
    """Return whether a file says that something is computed in float16."""
    return _FLOAT16.search(text) is not None


def dtype_of(node: ast.AST | None) -> str | None:
    """Return the dtype that an expression names; None where it is no name of one."""
    text = str(node.value) if isinstance(node, ast.Constant) else (dotted(node) or "").rpartition(".")[2]
    return {
        **dict.fromkeys(("float16", "half", "fp16"), "float16"),
        **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
        **dict.fromkeys(("float32", "float", "fp32"), "float32"),
    }.get(text)


def number(node: ast.AST) -> float | None:
    """Return the number that an expression writes: `1e-8`, `-1e9`, `float("-inf")`; None for anything else."""
    match node:
        case ast.UnaryOp(op=ast.USub()):
            value = number(node.operand)
            return None if value is None else -value
        case ast.Constant(value=int() | float() as written) if not isinstance(written, bool):
            return float(written)
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
            try:
                return float(text)
            except ValueError:
                return None
    return None


def _scaler_of(node: ast.AST | None) -> str | None:
    """Return the text of `scaler` in `scaler.scale(loss)`."""
    return dotted(receiver(node)) if called_name(node) == "scale" and isinstance(node, ast.Call) and node.args else None
