"""Rules about casting: what stands in a region, and what a device is asked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampx.syntax.program import constant, keywords

from .problem import Place
from .script import Script

_BCE: Final = {"torch.nn.functional.binary_cross_entropy", "torch.nn.functional.functional.binary_cross_entropy"}
_BF16: Final = {"torch.cuda.is_bf16_supported"}
_TEST: Final = re.compile(r"(test_.*|.*_test|conftest)\.py")
_POLICIES: Final = {
    "set_global_policy",
    "set_dtype_policy",
    "set_policy",
}


def backward_in_a_region(script: Script) -> Iterator[Place]:
    """Backward runs inside of a casting region."""
    for events in script.events.values():
        for event in events:
            region = script.region(event.node) if event.kind in ("scaled", "backward") else None
            if region is not None and region.enabled:
                name = script.program.code(region.call.func)
                yield (
                    event.node,
                    f"backward stands in the region of `{name}`: its own operations are cast a second time; end the "
                    "region after the loss",
                )


def bce_of_probabilities(script: Script) -> Iterator[Place]:
    """Binary cross entropy of float16 probabilities."""
    for call in script.calls:
        region = script.region(call)
        if region is None or not region.enabled or region.dtype == "bfloat16" or region.device == "cpu":
            continue
        if _is_bce(script, call):
            name = script.program.code(call.func)
            yield (
                call,
                f"`{name}` takes probabilities, whose logarithm float16 cannot hold; torch refuses it in a region on "
                "a GPU: use binary_cross_entropy_with_logits",
            )


def _is_bce(script: Script, call: ast.Call) -> bool:
    if script.names(call.func) & _BCE:
        return True
    return isinstance(call.func, (ast.Name, ast.Attribute)) and "torch.nn.BCELoss" in script.made_by(call.func)


def emulated_bfloat16(script: Script) -> Iterator[Place]:
    """Emulated bfloat16 is taken for hardware; a test asks whether bfloat16 can be computed at all."""
    for call in () if _TEST.fullmatch(script.source.path.name) else script.calls_of(_BF16):
        if not call.args and not call.keywords:
            yield (
                call,
                "`is_bf16_supported()` is true on GPUs that only emulate bfloat16, such as a T4, where it is slower "
                "than float32; pass `including_emulation=False`",
            )


def softmax_in_float16(script: Script) -> Iterator[Place]:
    """The last layer of a Keras model gives float16 probabilities."""
    if not any(_sets_mixed_float16(script, call) for call in script.calls):
        return
    for call in script.calls:
        is_softmax = constant(_activation(script, call)) in ("softmax", "sigmoid")
        if is_softmax and "dtype" not in keywords(call) and _is_last(script, call):
            yield (
                call,
                "under mixed_float16 this last layer gives float16 probabilities, of which small ones are 0; pass "
                '`dtype="float32"`',
            )


def _sets_mixed_float16(script: Script, call: ast.Call) -> bool:
    """Return whether a call sets the policy, which is passed by its name or as `Policy("mixed_float16")`."""
    sets = any(name.rpartition(".")[2] in _POLICIES for name in script.names(call.func))
    makers = [maker for value in call.args if sets for maker in script.makers(value)]
    names = [*call.args, *(argument for maker in makers for argument in maker.args)]
    return sets and any(constant(name) == "mixed_float16" for name in names)


def _activation(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the activation that a layer of Keras is made with."""
    layers = {name.rpartition(".")[2] for name in script.names(call.func) if "keras" in name.split(".")}
    if "Activation" in layers and call.args:
        return call.args[0]
    return keywords(call).get("activation") if "Dense" in layers else None


def _is_last(script: Script, call: ast.Call) -> bool:
    """Return whether a layer is the last of a list of layers, or what a model gives."""
    parent = script.program.parent(call)
    if isinstance(parent, (ast.List, ast.Tuple)):
        return parent.elts[-1] is call
    if isinstance(parent, ast.Call) and parent.func is call:  # `Dense(10, activation="softmax")(x)`
        outer = script.program.parent(parent)
        if isinstance(outer, ast.Assign) and isinstance(outer.targets[0], ast.Name):
            place = script.flow.place(outer.targets[0])
            uses = script.flow.uses.get(place, []) if place is not None else []
            return any(_is_output(script, use) for use in uses)
        return isinstance(outer, ast.Call) and _makes_model(script, outer)
    return False


def _is_output(script: Script, use: ast.AST) -> bool:
    parent = script.program.parent(use)
    call = script.program.parent(parent) if isinstance(parent, ast.keyword) else parent
    if isinstance(parent, ast.keyword) and parent.arg not in ("outputs",):
        return False
    return isinstance(call, ast.Call) and _makes_model(script, call)


def _makes_model(script: Script, call: ast.Call) -> bool:
    return any(name.rpartition(".")[2] == "Model" and "keras" in name for name in script.names(call.func))
