"""Rules about values: weights that cannot move, constants that a dtype cannot hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampx.syntax.program import called_name, dotted

from .problem import Place
from .script import Script, dtype_of, number

_LARGEST: Final = 65504.0
_ROUNDS_TO_0: Final = 2.0**-25  # half of the least float16
_MASTERS: Final = re.compile(
    r"master|multi_precision|FP16_Optimizer|FP16Optimizer|deepspeed|stochastic|[Kk]ahan|ampx|apex|bitsandbytes|torchao"
)
_PRODUCTS: Final = {
    *(f"torch.{name}" for name in ("mm", "bmm", "matmul", "einsum", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")),
    *(f"torch.nn.functional.{name}" for name in ("linear", "conv1d", "conv2d", "conv3d")),
    *(f"paddle.{name}" for name in ("mm", "bmm", "matmul", "einsum")),
    "paddle.nn.functional.linear",
}
_KEEP: Final = {"sigmoid", "tanh", "relu", "abs", "max", "amax", "clamp", "transpose", "view", "reshape", "squeeze"}
_WHERE: Final = {"torch.where", "paddle.where", "jax.numpy.where", "tensorflow.where", "mxnet.nd.where"}
_FLOATX: Final = {"set_floatx", "set_dtype_policy", "set_global_policy"}


def weights_without_masters(script: Script) -> Iterator[Place]:
    """Low-precision weights are updated in their own dtype."""
    if _MASTERS.search(script.source.text):
        return
    for call in script.calls:
        if any(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in script.names(call.func)):
            yield from _torch_weights(script, call)
    yield from _tree_weights(script)
    for call in script.calls:
        names = {name for name in script.names(call.func) if name.rpartition(".")[2] in _FLOATX and "keras" in name}
        dtype = dtype_of(call.args[0]) if call.args and isinstance(call.args[0], ast.Constant) else None
        if names and dtype in ("float16", "bfloat16"):
            yield (
                call,
                f"all weights become {dtype}, and updates smaller than their rounding are lost; use the policy "
                f'"mixed_{dtype}"',
            )
        if called_name(call) == "Trainer" and any(name.endswith("gluon.Trainer") for name in script.names(call.func)):
            yield from _gluon_weights(script, call)


def _torch_weights(script: Script, call: ast.Call) -> Iterator[Place]:
    first = call.args[0] if call.args else None
    if (
        not isinstance(first, ast.Call)
        or called_name(first) != "parameters"
        or not isinstance(first.func, ast.Attribute)
    ):
        return
    model = dotted(first.func.value)
    if model is None:
        return
    dtype = _dtype_at(script, model, call)
    if dtype in ("float16", "bfloat16"):
        name = script.program.code(call.func)
        epsilon = " Its eps of 1e-8 is 0 in float16, too." if dtype == "float16" and "Adam" in name else ""
        yield (
            call,
            f"`{name}` updates weights of {dtype}: updates smaller than their rounding are lost.{epsilon} Keep the "
            "weights in float32 and cast in a region, or keep float32 copies",
        )


def _dtype_at(script: Script, model: str, before: ast.AST) -> str | None:
    """Return the dtype that a model was last cast to in a function, by the text; None where it was not."""
    function = script.program.function(before)
    dtype = None
    statements: list[ast.Assign | ast.Expr] = [*script.program.every(ast.Assign), *script.program.every(ast.Expr)]
    for statement in sorted(statements, key=script.program.order):
        if script.program.function(statement) is not function or not script.is_before(statement, before):
            continue
        if script.excludes(statement, before) or not script.implies(before, statement):
            continue
        value = statement.value
        if isinstance(statement, ast.Assign):
            if any(dotted(target) == model for target in statement.targets):
                dtype = _cast(value) or (dtype if _begins_with(value, model) else None)
        elif _begins_with(value, model):
            dtype = _cast(value) or dtype
    return dtype


def _begins_with(value: ast.AST, model: str) -> bool:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return dotted(value) == model


def _cast(value: ast.AST) -> str | None:
    """Return the dtype that the last cast of a chain of methods names."""
    while isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg in ("torch_dtype", "dtype") and dtype_of(keyword.value):
                return dtype_of(keyword.value)
        if not isinstance(value.func, ast.Attribute):
            return None
        if value.func.attr in ("half", "bfloat16", "float") and not value.args:
            return dtype_of(ast.Constant(value.func.attr))
        if value.func.attr in ("to", "type"):
            dtypes = [dtype_of(argument) for argument in value.args if not isinstance(argument, ast.Constant)]
            named = next((dtype for dtype in dtypes if dtype), None)
            if named is not None:
                return named
        value = value.func.value
    return None


def _tree_weights(script: Script) -> Iterator[Place]:
    """Parameters of JAX that were cast and given to an optimizer of optax."""
    maps = {"jax.tree.map", "jax.tree_map", "jax.tree_util.tree_map"}
    for call in script.calls:
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr != "init" or not call.args:
            continue
        if not any(name.startswith("optax.") for name in script.made_by(function.value)):
            continue
        for maker in script.makers(call.args[0]):
            if not script.names(maker.func) & maps or not maker.args:
                continue
            casts = [inner for inner in ast.walk(maker.args[0]) if isinstance(inner, ast.Call)]
            dtypes = {dtype_of(inner.args[0]) for inner in casts if called_name(inner) == "astype" and inner.args}
            low = next((dtype for dtype in dtypes if dtype in ("float16", "bfloat16")), None)
            if low is not None:
                yield (
                    call,
                    f"the optimizer updates parameters of {low}: updates smaller than their rounding are lost; keep "
                    "float32 parameters and cast them where they are used",
                )


def _gluon_weights(script: Script, call: ast.Call) -> Iterator[Place]:
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Call) or called_name(first) != "collect_params":
        return
    net = dotted(first.func.value) if isinstance(first.func, ast.Attribute) else None
    casts = [
        other
        for other in script.calls
        if called_name(other) == "cast"
        and isinstance(other.func, ast.Attribute)
        and dotted(other.func.value) == net
        and script.program.function(other) is script.program.function(call)
        and other.args
        and dtype_of(other.args[0]) == "float16"
    ]
    options = call.args[2] if len(call.args) > 2 else None
    if casts and (options is None or isinstance(options, ast.Dict)):
        yield (
            call,
            "the trainer updates weights of float16: updates smaller than their rounding are lost; pass "
            '"multi_precision": True',
        )


def too_large(script: Script) -> Iterator[Place]:
    """A constant is infinite in float16."""
    if not script.float16:
        return
    for call in script.calls:
        name = called_name(call)
        value: ast.AST | None = None
        other: ast.AST | None = None
        if name in ("masked_fill", "masked_fill_") and isinstance(call.func, ast.Attribute) and len(call.args) >= 2:
            value, other = call.args[-1], call.func.value
        elif script.names(call.func) & _WHERE and len(call.args) == 3:
            constants = [argument for argument in call.args[1:] if number(argument) is not None]
            value = constants[0] if len(constants) == 1 else None
            other = next((argument for argument in call.args[1:] if argument is not value), None)
        constant = None if value is None else number(value)
        if constant is not None and _LARGEST < abs(constant) < float("inf") and not _is_float32(script, call, other):
            yield _constant(script, call, value)
    for product in script.program.every(ast.BinOp):
        if isinstance(product.op, ast.Mult):
            for side, other in ((product.left, product.right), (product.right, product.left)):
                constant = number(side)
                if (
                    constant is not None
                    and -float("inf") < constant < -_LARGEST
                    and number(other) is None  # of two numbers Python makes one
                    and not _is_float32(script, product, other)
                ):
                    yield _constant(script, product, side)


def _constant(script: Script, node: ast.AST, value: ast.AST | None) -> Place:
    text = script.program.code(value) if value is not None else ""
    return (
        node,
        f"{text} is beyond the range of float16, which ends at 65504: it becomes infinite or is refused; use "
        "`torch.finfo(x.dtype).min` or its like, or compute this in float32",
    )


def _is_float32(script: Script, node: ast.AST, other: ast.AST | None) -> bool:
    """Return whether a value is float32 by the text, or the code looks at its dtype."""
    if any("dtype" in ast.unparse(test.test) for test in script.program.branches(node)):
        return True
    return other is not None and any(
        dtype_of(inner) == "float32" or (isinstance(inner, ast.Call) and called_name(inner) in ("float", "double"))
        for inner in ast.walk(other)
    )


def rounds_to_0(script: Script) -> Iterator[Place]:
    """An epsilon is 0 in float16."""
    for total in script.program.every(ast.BinOp):
        if not isinstance(total.op, ast.Add):
            continue
        for side, other in ((total.left, total.right), (total.right, total.left)):
            value = number(side)
            if value is not None and 0 < value <= _ROUNDS_TO_0 and _is_low(script, other, total, 3):
                yield (
                    total,
                    f"{script.program.code(side)} is 0 in float16, whose least number is 6e-8, and so guards nothing "
                    "here; use 1e-6 or more, or compute this in float32",
                )


def _is_low(script: Script, node: ast.AST, where: ast.AST, depth: int) -> bool:
    """Return whether an expression is float16 by the text: the product of a casting region, or cast by hand."""
    if isinstance(node, ast.Name) and depth:
        function = script.program.function(where)
        assigned = [
            assign
            for assign in script.program.every(ast.Assign)
            if script.program.function(assign) is function
            and script.is_before(assign, where)
            and not script.excludes(assign, where)
            and any(dotted(target) == node.id for target in assign.targets)
        ]
        return bool(assigned) and _is_low(script, assigned[-1].value, where, depth - 1)
    if isinstance(node, ast.Call):
        name = called_name(node)
        if name == "half" or (name in ("to", "astype", "cast", "type") and "float16" in map(dtype_of, node.args)):
            return True
        if script.names(node.func) & _PRODUCTS:
            return _is_cast(script, node)
        if name in _KEEP:
            inner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return any(_is_low(script, value, where, depth) for value in (*node.args[:1], *inner))
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return _is_cast(script, node)
    return False


def _is_cast(script: Script, node: ast.AST) -> bool:
    region = script.region(node)
    return region is not None and region.enabled and region.dtype == "float16"
