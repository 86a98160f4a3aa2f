"""Follow a value through the names of one file: where it is bound, where it is used, where it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst
from libcst import metadata

from .source import Reference, Source, dotted

# What holds a value: a name in a scope, or a dotted name such as `self.scaler` in a class or scope.
Place: TypeAlias = tuple[object, str]


@dataclass(frozen=True)
class Binding:
    """Where a place gets a value.

    Attributes:
        node: The target, or the parameter.
        statement: The assignment; None for a parameter.
        value: What is assigned, where it is one expression.
    """

    node: cst.CSTNode
    statement: cst.CSTNode | None
    value: cst.BaseExpression | None


class Flow:
    """Bindings and uses by place, and which function's parameters get which arguments."""

    def __init__(self, source: Source) -> None:
        """Read all assignments and calls once."""
        self.source = source
        self.bindings: dict[Place, list[Binding]] = {}
        self.uses: dict[Place, list[Reference]] = {}
        self._functions = {one.name.value: one for one in source.every(cst.FunctionDef)}
        self._arguments: dict[Place, list[cst.BaseExpression]] = {}
        self._targets: set[cst.CSTNode] = set()
        self._read_assignments()
        self._read_parameters()
        self._read_uses()
        self._read_calls()

    def place(self, node: cst.CSTNode) -> Place | None:
        """Give the place an expression names; None where it is no name, or one that is not bound here."""
        text = dotted(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        if text is None:
            return None
        root = text.partition(".")[0]
        if root == "self" and "." in text:
            return self.source.enclosing_class(node), text
        scope = self.source.scope(node)
        found = scope[root]
        if any(isinstance(one, metadata.ImportAssignment) for one in found):
            return None
        home = next((one.scope for one in found if not isinstance(one, metadata.BuiltinAssignment)), None)
        return None if home is None else (home, text)

    def arguments(self, place: Place) -> list[cst.BaseExpression]:
        """Give what the calls of this file pass for a parameter."""
        return self._arguments.get(place, [])

    def calls_of(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Give the calls of a function of this file by its name."""
        return [call for call in self.source.every(cst.Call) if self.called(call) is function]

    def called(self, call: cst.Call) -> cst.FunctionDef | None:
        """Give the function or method of this file that a call is known to reach."""
        name = dotted(call.func)
        if name is None:
            return None
        method = name.startswith("self.") and name.count(".") == 1
        function = self._functions.get(name.removeprefix("self."))
        if function is None or (not method and "." in name):
            return None
        owner = self.source.enclosing_class(function)
        return function if owner is (self.source.enclosing_class(call) if method else None) else None

    def origins(self, node: cst.BaseExpression) -> list[Binding] | None:
        """Give the assignments that an expression's value comes from, through parameters; None if not known."""
        place = self.place(node)
        if place is None:
            return None
        return self._origins(place, set())

    def _origins(self, place: Place, seen: set[Place]) -> list[Binding] | None:
        if place in seen:
            return []
        seen.add(place)
        bindings = self.bindings.get(place, [])
        if not bindings:
            return None
        found: list[Binding] = []
        for binding in bindings:
            if isinstance(binding.node, cst.Param):
                passed = self.arguments(place)
                if not passed:
                    return None
                for one in passed:
                    inner = self.place(one)
                    deeper = None if inner is None else self._origins(inner, seen)
                    if deeper is None:
                        return None
                    found.extend(one for one in deeper if one not in found)
            elif binding.statement is None:
                return None
            elif not is_none(binding.value):
                found.append(binding)
        return found

    def _read_assignments(self) -> None:
        for node in self.source.nodes:
            if isinstance(node, cst.Assign):
                for one in node.targets:
                    self._bind(one.target, node, node.value)
            elif isinstance(node, cst.AnnAssign) and node.value is not None:
                self._bind(node.target, node, node.value)
            elif isinstance(node, (cst.AugAssign, cst.For, cst.NamedExpr)):
                self._bind(node.target, None, None)
            elif isinstance(node, cst.AsName):
                self._bind(node.name, None, None)

    def _bind(self, target: cst.CSTNode, statement: cst.CSTNode | None, value: cst.BaseExpression | None) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._bind(element.value, statement, None)
            return
        self._targets.add(target)
        place = self.place(target)
        if place is not None:
            self.bindings.setdefault(place, []).append(Binding(target, statement, value))

    def _read_parameters(self) -> None:
        for node in self.source.every(cst.Param):
            self._targets.add(node.name)
            place = self._parameter(node)
            if place is not None:
                self.bindings.setdefault(place, []).append(Binding(node, None, None))

    def _parameter(self, node: cst.Param) -> Place | None:
        function = next((one for one in self.source.around(node) if isinstance(one, cst.FunctionDef)), None)
        if function is None:
            return None
        return self.source.scope(function.body), node.name.value

    def _read_uses(self) -> None:
        for node in self.source.nodes:
            if not isinstance(node, (cst.Name, cst.Attribute)) or node in self._targets:
                continue
            parent = self.source.parent(node)
            if isinstance(parent, cst.Attribute) and parent.attr is node:
                continue
            if isinstance(parent, cst.Arg) and parent.keyword is node:
                continue
            if isinstance(parent, (cst.ImportAlias, cst.ImportFrom, cst.AsName, cst.Param, cst.NameItem)):
                continue
            place = self.place(node)
            if place is not None:
                self.uses.setdefault(place, []).append(node)

    def _read_calls(self) -> None:
        for call in self.source.every(cst.Call):
            function = self.called(call)
            if function is not None:
                for parameter, value in self.passed(call, function):
                    place = self._parameter(parameter)
                    if place is not None:
                        self._arguments.setdefault(place, []).append(value)

    def passed(self, call: cst.Call, function: cst.FunctionDef) -> Iterator[tuple[cst.Param, cst.BaseExpression]]:
        """Give the parameters of a function with what a call passes for them."""
        parameters = [*function.params.posonly_params, *function.params.params]
        if self.source.enclosing_class(function) is not None:
            parameters = parameters[1:]
        by_name = {one.name.value: one for one in (*parameters, *function.params.kwonly_params)}
        for position, arg in enumerate(call.args):
            if arg.star:
                return
            if arg.keyword is not None:
                if arg.keyword.value in by_name:
                    yield by_name[arg.keyword.value], arg.value
            elif position < len(parameters):
                yield parameters[position], arg.value


def is_none(value: cst.CSTNode | None) -> bool:
    """Tell whether an expression is the word None."""
    return isinstance(value, cst.Name) and value.value == "None"
