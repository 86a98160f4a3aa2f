"""Follow a value through the names of a program: where it is bound, where it is used, where it came from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .program import FUNCTIONS, Function, Program, Reference, dotted, is_none

# What holds a value: a name in a scope, or a dotted name such as `self.scaler` in a class or scope.
Place: TypeAlias = tuple[object, str]


@dataclass(frozen=True, eq=False)
class Binding:
    """Where a place gets a value."""

    node: ast.AST  # the target, or the parameter
    statement: ast.stmt | None  # the assignment; None for a parameter and for what is bound in another way
    value: ast.expr | None  # what is assigned, where it is one expression


class Flow:
    """Bindings and uses by place, and which function's parameters get which arguments."""

    def __init__(self, program: Program) -> None:
        """Read all assignments and calls of the files that the program has."""
        self.program = program
        self.bindings: dict[Place, list[Binding]] = {}
        self.uses: dict[Place, list[Reference]] = {}
        self.attributes: dict[str, list[ast.Attribute]] = {}
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._arguments: dict[Place, list[ast.expr]] = {}
        self._receivers: dict[ast.AST, list[Place]] = {}
        self._targets: set[ast.AST] = set()
        self._instances: dict[Place, ast.ClassDef] = {}
        for _ in range(4):  # what a place holds tells what its methods are, which tells what their parameters hold
            count = len(self._instances)
            self._read()
            if len(self._instances) == count:
                break

    def _read(self) -> None:
        for table in (self.bindings, self.uses, self.attributes, self._calls, self._arguments, self._receivers):
            table.clear()
        for source in self.program.sources:
            self._read_assignments(source.tree)
            self._read_parameters(source.tree)
        for source in self.program.sources:
            self._read_uses(source.tree)
            self._read_calls(source.tree)
        self._find_instances()

    # -- places ------------------------------------------------------------------------------------------

    def place(self, node: ast.AST) -> Place | None:
        """Return the place an expression names; None where it is no name, or one of something unknown."""
        text = dotted(node)
        if text is None:
            return None
        root, _, rest = text.partition(".")
        if root == "self" and rest:
            cls = self.program.enclosing_class(node)
            return None if cls is None else self._inside_instances((self.family(cls), text))
        name = node
        while isinstance(name, ast.Attribute):
            name = name.value
        home = self.program.scope(name).find(root)
        if home is None:
            return None
        for definition in home.imports.get(root, ()):
            return self.program.definitions(f"{definition.imported}.{rest}" if rest else str(definition.imported), node)
        return self._inside_instances((home, text))

    def bindings_at(self, place: Place | None) -> list[Binding]:
        """Return where a place gets its values."""
        return self.bindings.get(place, []) if place is not None else []

    def values_at(self, place: Place | None) -> list[ast.expr]:
        """Return what is assigned to a place, as far as it is one expression each time."""
        return [binding.value for binding in self.bindings_at(place) if binding.value is not None]

    def uses_at(self, place: Place | None) -> list[Reference]:
        """Return where a place is read."""
        return self.uses.get(place, []) if place is not None else []

    def _inside_instances(self, place: Place) -> Place:
        """Return an attribute of an object whose class is known as an attribute of `self` in that class."""
        parts = place[1].split(".")
        for count in range(1, len(parts)):
            cls = self._instances.get((place[0], ".".join(parts[:count])))
            if cls is not None:
                return self._inside_instances((self.family(cls), ".".join(["self", *parts[count:]])))
        return place

    def _find_instances(self) -> None:
        """Note which places always hold an object of one class of the program, made there or passed on."""
        for place in self.bindings:
            origins = self._origins(place, None, set()) if place not in self._instances else None
            calls = [origin.value for origin in origins or () if isinstance(origin.value, ast.Call)]
            classes = {self.class_of(call.func) for call in calls}
            cls = classes.pop() if len(classes) == 1 and len(calls) == len(origins or ()) else None
            if cls is not None:
                self._instances[place] = cls

    def family(self, cls: ast.ClassDef) -> ast.ClassDef:
        """Return the outermost base of a class that the program has: subclasses share what hangs on `self`."""
        for _ in range(16):
            base = next((base for base in map(self.class_of, cls.bases) if base is not None), None)
            if base is None or base is cls:
                break
            cls = base
        return cls

    def class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """Return the class of the program that an expression names."""
        definition = self._definition(node)
        return definition if isinstance(definition, ast.ClassDef) else None

    def _definition(self, node: ast.AST) -> ast.AST | None:
        place = self.place(node)
        if place is None or not hasattr(place[0], "names") or "." in place[1]:
            return None
        definitions = place[0].names.get(place[1], [])
        return definitions[0].node if len(definitions) == 1 else None

    # -- calls -------------------------------------------------------------------------------------------

    def arguments(self, place: Place) -> list[ast.expr]:
        """Return what the calls of the program pass for a parameter."""
        return self._arguments.get(place, [])

    def receivers(self, value: ast.expr) -> list[Place]:
        """Return the parameters that get an argument of a call."""
        return self._receivers.get(value, [])

    def calls_of(self, function: Function) -> list[ast.Call]:
        """Return the calls that are known to reach a function."""
        return self._calls.get(function, [])

    def called(self, call: ast.Call) -> Function | None:
        """Return the function or method of the program that a call is known to reach; of a class its `__init__`."""
        function = call.func
        match function:
            case ast.Attribute(value=ast.Call() | ast.Name("self")):
                return self._own_method(call, function)
        held = self._instances.get(self.place(function) or (None, ""))
        if held is not None:
            return self.method(held, "__call__")
        if isinstance(function, ast.Attribute):
            held = self._instances.get(self.place(function.value) or (None, ""))
            if held is not None:
                return self.method(held, function.attr)
        definition = self._definition(function)
        if isinstance(definition, ast.ClassDef):
            return self.method(definition, "__init__")
        return definition if isinstance(definition, FUNCTIONS) else None

    def _own_method(self, call: ast.Call, function: ast.Attribute) -> Function | None:
        """Return the method that `self.method()` or `super().method()` calls; None for one of another call's result."""
        cls = self.program.enclosing_class(call)
        if cls is None:
            return None
        if not isinstance(function.value, ast.Call):
            return self.method(cls, function.attr)
        if dotted(function.value.func) != "super":
            return None
        inherited = (self.method(base, function.attr) for base in map(self.class_of, cls.bases) if base is not None)
        return next((method for method in inherited if method is not None), None)

    def method(self, cls: ast.ClassDef, name: str, depth: int = 8) -> Function | None:
        """Return a method of a class, its own or of a base that the program has."""
        for statement in reversed(cls.body):
            if isinstance(statement, FUNCTIONS) and statement.name == name:
                return statement
        for base in map(self.class_of, cls.bases) if depth else ():
            inherited = None if base is None else self.method(base, name, depth - 1)
            if inherited is not None:
                return inherited
        return None

    def passed(self, call: ast.Call, function: Function) -> Iterator[tuple[ast.arg, ast.expr]]:
        """Yield the parameters of a function with what a call passes for them."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        decorators = {dotted(decorator) for decorator in function.decorator_list}
        if isinstance(self.program.parent(function), ast.ClassDef) and "staticmethod" not in decorators:
            parameters = parameters[1:]
        by_name = {parameter.arg: parameter for parameter in (*parameters, *function.args.kwonlyargs)}
        for parameter, value in zip(parameters, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            yield parameter, value
        for keyword in call.keywords:
            if keyword.arg in by_name:
                yield by_name[keyword.arg], keyword.value

    # -- origins -----------------------------------------------------------------------------------------

    def origins(self, node: ast.expr, home: ast.AST | None = None) -> list[Binding] | None:
        """Return the assignments that an expression's value comes from, through parameters; None if not known.

        What `home`, a function or module, assigns is an origin, also where that is another name of something.
        """
        place = self.place(node)
        return None if place is None else self._origins(place, home, set())

    def _origins(self, place: Place, home: ast.AST | None, seen: set[Place]) -> list[Binding] | None:
        if place in seen:
            return []
        seen.add(place)
        bindings = self.bindings_at(place)
        if not bindings:
            return None
        origins: list[Binding] = []
        for binding in bindings:
            sources = self._sources(place, binding, home)
            if sources is None:
                return None
            origins += [] if sources or is_none(binding.value) else [binding]
            for source in sources:
                inner = self.place(source)
                deeper = [] if is_none(source) else None if inner is None else self._origins(inner, home, seen)
                if deeper is None:
                    return None
                origins += [origin for origin in deeper if origin not in origins]
        return origins

    def _sources(self, place: Place, binding: Binding, home: ast.AST | None) -> list[ast.expr] | None:
        """Return the expressions that a binding is another name of; None where nothing is known of what it binds."""
        if isinstance(binding.node, ast.arg):
            return self.arguments(place) or None
        if binding.statement is None:
            return None
        is_alias = dotted(binding.value) and self.program.function(binding.statement) is not home
        return [binding.value] if is_alias and binding.value is not None else []

    # -- reading -----------------------------------------------------------------------------------------

    def _read_assignments(self, tree: ast.Module) -> None:
        program = self.program
        for assign in program.every(ast.Assign, tree):
            for target in assign.targets:
                self._bind(target, assign, assign.value)
        for annotated in program.every(ast.AnnAssign, tree):
            if annotated.value is not None:
                self._bind(annotated.target, annotated, annotated.value)
        others: list[ast.For | ast.AsyncFor | ast.AugAssign | ast.NamedExpr] = [
            *program.every(ast.For, tree),
            *program.every(ast.AsyncFor, tree),
            *program.every(ast.AugAssign, tree),
            *program.every(ast.NamedExpr, tree),
        ]
        blocks: list[ast.With | ast.AsyncWith] = [*program.every(ast.With, tree), *program.every(ast.AsyncWith, tree)]
        targets: list[ast.AST | None] = [other.target for other in others]
        targets += [item.optional_vars for block in blocks for item in block.items]
        for bound in targets:
            if bound is not None:
                self._bind(bound, None, None)

    def _bind(self, target: ast.AST, statement: ast.stmt | None, value: ast.expr | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            same = len(values) == len(target.elts) and not any(
                isinstance(element_value, ast.Starred) for element_value in values
            )
            for position, element in enumerate(target.elts):
                self._bind(element, statement, values[position] if same else None)
            return
        self._targets.add(target)
        place = self.place(target)
        if place is not None:
            self.bindings.setdefault(place, []).append(Binding(target, statement, value))

    def _read_parameters(self, tree: ast.Module) -> None:
        for parameter in self.program.every(ast.arg, tree):
            self.bindings.setdefault(self.parameter_place(parameter), []).append(Binding(parameter, None, None))

    def parameter_place(self, parameter: ast.arg) -> Place:
        """Return the place of a parameter."""
        return self.program.scope(parameter), parameter.arg

    def _read_uses(self, tree: ast.Module) -> None:
        names: list[Reference] = [*self.program.every(ast.Name, tree), *self.program.every(ast.Attribute, tree)]
        for node in names:
            if isinstance(node, ast.Attribute):
                self.attributes.setdefault(node.attr, []).append(node)
            if node in self._targets or not isinstance(node.ctx, ast.Load):
                continue
            place = self.place(node)
            if place is not None:
                self.uses.setdefault(place, []).append(node)

    def _read_calls(self, tree: ast.Module) -> None:
        for call in self.program.every(ast.Call, tree):
            function = self.called(call)
            if function is not None:
                self._calls.setdefault(function, []).append(call)
                for parameter, value in self.passed(call, function):
                    place = self.parameter_place(parameter)
                    self._arguments.setdefault(place, []).append(value)
                    self._receivers.setdefault(value, []).append(place)
