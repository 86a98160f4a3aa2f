"""Rules about values: weights that cannot move, constants that a dtype cannot hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from ampx.syntax.program import called_name, dotted, keywords, receiver

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
_CASTS: Final = {"to", "type", "astype", "cast", "half", "bfloat16", "type_as"}
_WHERE: Final = {"torch.where", "paddle.where", "jax.numpy.where", "tensorflow.where", "mxnet.nd.where"}
# What computes in the dtype of its operand, where no region is around it.
_IN_ITS_DTYPE: Final = _KEEP | {
    *("exp", "log", "mean", "norm", "pow", "rsqrt", "softmax", "softplus", "sqrt", "square", "std", "sum", "var")
}
_SQUARES: Final = "squares from 256 on are infinite and those of 1.7e-4 and less are 0"
_LOST: Final = {
    **dict.fromkeys(("log", "log2", "log10"), "what is below 3e-8 is 0 and its logarithm infinite"),
    "rsqrt": "what is below 3e-8 is 0 and its root divides by that",
}
_TREE_MAPS: Final = {"jax.tree.map", "jax.tree_map", "jax.tree_util.tree_map"}
_LOW: Final = ("float16", "bfloat16")
_FLOATX: Final = {"set_floatx", "set_dtype_policy", "set_global_policy"}


def weights_without_masters(script: Script) -> Iterator[Place]:
    """Low-precision weights are updated in their own dtype."""
    if _MASTERS.search(script.source.text):
        return
    for call in script.calls:
        yield from _torch_weights(script, call)
        yield from _tree_weights(script, call)
        yield from _keras_weights(script, call)
        yield from _gluon_weights(script, call)


def _torch_weights(script: Script, call: ast.Call) -> Iterator[Place]:
    """Yield an optimizer of PyTorch that is given the parameters of a model that was cast."""
    if not any(name.startswith("torch.optim.") and "lr_scheduler" not in name for name in script.names(call.func)):
        return
    first = call.args[0] if call.args else None
    model = dotted(receiver(first)) if called_name(first) == "parameters" else None
    dtype = None if model is None else _dtype_at(script, model, call)
    if dtype in _LOW:
        name = script.program.code(call.func)
        epsilon = " Its eps of 1e-8 is 0 in float16, too." if dtype == "float16" and "Adam" in name else ""
        yield (
            call,
            f"`{name}` updates weights of {dtype}: updates smaller than their rounding are lost.{epsilon} Keep the "
            "weights in float32 and cast in a region, or keep float32 copies",
        )


def _dtype_at(script: Script, model: str, before: ast.AST) -> str | None:
    """Return the dtype that a model was last cast to in a function, by the text; None where it was not."""
    dtype = None
    statements: list[ast.Assign | ast.Expr] = [*script.program.every(ast.Assign), *script.program.every(ast.Expr)]
    for statement in sorted(statements, key=script.program.order):
        if not _always_comes_before(script, statement, before):
            continue
        value = statement.value
        if isinstance(statement, ast.Assign):
            if any(dotted(target) == model for target in statement.targets):
                dtype = _cast(value) or (dtype if _begins_with(value, model) else None)
        elif _begins_with(value, model):
            dtype = _cast(value) or dtype
    return dtype


def _always_comes_before(script: Script, first: ast.AST, second: ast.AST) -> bool:
    return (
        script.program.function(first) is script.program.function(second)
        and script.comes_before(first, second)
        and script.implies(second, first)
    )


def _begins_with(value: ast.AST, model: str) -> bool:
    while (inner := receiver(value)) is not None:
        value = inner
    return dotted(value) == model


def _cast(value: ast.AST) -> str | None:
    """Return the dtype that the last cast of a chain of methods names."""
    while isinstance(value, ast.Call):
        dtype = _dtype_of_cast(value)
        inner = receiver(value)
        if dtype is not None or inner is None:
            return dtype
        value = inner
    return None


def _dtype_of_cast(call: ast.Call) -> str | None:
    """Return the dtype that a call names, as `.half()` or `from_pretrained(torch_dtype=torch.float16)`; else None."""
    named = [dtype_of(keyword.value) for keyword in call.keywords if keyword.arg in ("torch_dtype", "dtype")]
    if receiver(call) is not None:
        name = called_name(call)
        if name in ("half", "bfloat16", "float") and not call.args:
            named.append(dtype_of(ast.Constant(name)))
        if name in ("to", "type"):
            named += [dtype_of(argument) for argument in call.args if not isinstance(argument, ast.Constant)]
    return next((dtype for dtype in named if dtype), None)


def _tree_weights(script: Script, call: ast.Call) -> Iterator[Place]:
    """Yield a call that gives parameters of JAX that were cast to an optimizer of optax."""
    optimizer = receiver(call)
    if optimizer is None or called_name(call) != "init" or not call.args:
        return
    if any(name.startswith("optax.") for name in script.made_by(optimizer)):
        for maker in script.makers(call.args[0]):
            low = _low_dtype_of_tree(script, maker)
            if low is not None:
                yield (
                    call,
                    f"the optimizer updates parameters of {low}: updates smaller than their rounding are lost; keep "
                    "float32 parameters and cast them where they are used",
                )


def _low_dtype_of_tree(script: Script, maker: ast.Call) -> str | None:
    """Return the low-precision dtype to which a call of `jax.tree.map` casts; None where it is no such call."""
    if not script.names(maker.func) & _TREE_MAPS or not maker.args:
        return None
    casts = [inner for inner in ast.walk(maker.args[0]) if isinstance(inner, ast.Call)]
    dtypes = {dtype_of(inner.args[0]) for inner in casts if called_name(inner) == "astype" and inner.args}
    return next((dtype for dtype in dtypes if dtype in _LOW), None)


def _keras_weights(script: Script, call: ast.Call) -> Iterator[Place]:
    """Yield a call that makes all weights of Keras low precision."""
    dtype = dtype_of(call.args[0]) if call.args and isinstance(call.args[0], ast.Constant) else None
    if dtype in _LOW and any(
        name.rpartition(".")[2] in _FLOATX and "keras" in name for name in script.names(call.func)
    ):
        yield (
            call,
            f"all weights become {dtype}, and updates smaller than their rounding are lost; use the policy "
            f'"mixed_{dtype}"',
        )


def _gluon_weights(script: Script, call: ast.Call) -> Iterator[Place]:
    """Yield a trainer of gluon that is given the parameters of a network that was cast."""
    if called_name(call) != "Trainer" or not any(name.endswith("gluon.Trainer") for name in script.names(call.func)):
        return
    first = call.args[0] if call.args else None
    if called_name(first) != "collect_params":
        return
    options = call.args[2] if len(call.args) > 2 else None
    if not isinstance(options, (ast.Dict, type(None))):
        return
    net = dotted(receiver(first))
    same_function = script.calls_in(script.program.function(call))
    if any(_casts_to_float16(other, net) for other in same_function):
        yield (
            call,
            "the trainer updates weights of float16: updates smaller than their rounding are lost; pass "
            '"multi_precision": True',
        )


def _casts_to_float16(call: ast.Call, net: str | None) -> bool:
    """Return whether a call is `net.cast("float16")`."""
    owner = receiver(call) if called_name(call) == "cast" else None
    return owner is not None and dotted(owner) == net and bool(call.args) and dtype_of(call.args[0]) == "float16"


def too_large(script: Script) -> Iterator[Place]:
    """A constant is infinite in float16."""
    if script.float16:
        for node, value, other in (*_filled_in(script), *_added_as_masks(script)):
            constant = number(value)
            if (
                constant is not None
                and _LARGEST < abs(constant) < float("inf")
                and not _is_float32(script, node, other)
            ):
                yield (
                    node,
                    f"{script.program.code(value)} is beyond the range of float16, which ends at 65504: it becomes "
                    "infinite or is refused; use `torch.finfo(x.dtype).min` or its like, or compute this in float32",
                )


def _filled_in(script: Script) -> Iterator[tuple[ast.AST, ast.expr, ast.expr | None]]:
    """Yield calls of `masked_fill` and `where` with the constant, and with what the dtype is of."""
    for call in script.calls:
        owner = receiver(call)
        if called_name(call) in ("masked_fill", "masked_fill_") and owner is not None and len(call.args) >= 2:
            yield call, call.args[-1], owner
        elif script.names(call.func) & _WHERE and len(call.args) == 3:
            constants = [argument for argument in call.args[1:] if number(argument) is not None]
            if len(constants) == 1:
                yield call, constants[0], next((value for value in call.args[1:] if value is not constants[0]), None)


def _added_as_masks(script: Script) -> Iterator[tuple[ast.AST, ast.expr, ast.expr | None]]:
    """Yield products with a negative constant, as in `(1 - mask) * -1e9`; of two numbers Python makes one."""
    for product in script.program.every(ast.BinOp):
        if isinstance(product.op, ast.Mult):
            for side, other in ((product.left, product.right), (product.right, product.left)):
                if (number(side) or 0.0) < 0 and number(other) is None:
                    yield product, side, other


def _is_float32(script: Script, node: ast.AST, other: ast.AST | None) -> bool:
    """Return whether a value may be float32 by the text, or the code looks at its dtype."""
    if any("dtype" in ast.unparse(test.test) for test in script.program.branches(node)):
        return True
    return other is not None and (_has_float32(script, other, node) or _is_promoted(script, other, node))


def _has_float32(script: Script, node: ast.AST, where: ast.AST, depth: int = 4) -> bool:
    """Return whether something in an expression is float32 by the text, and so is what is computed of it."""
    match node:
        case ast.Name() if depth:
            value = _assigned_before(script, node.id, where)
            return value is not None and _has_float32(script, value, script.program.statement(value), depth - 1)
        case ast.Call():
            dtypes = {dtype_of(argument) for argument in (*node.args, *keywords(node).values())}
            if called_name(node) in ("float", "double") or "float32" in dtypes:
                return True
            if called_name(node) in _CASTS or script.names(node.func) & _PRODUCTS:
                return False
    return any(_has_float32(script, child, where, depth) for child in ast.iter_child_nodes(node))


def _is_promoted(script: Script, node: ast.AST, where: ast.AST, depth: int = 4) -> bool:
    """Return whether a value is a sum of tensors: of float16 and float32, as of a product and a bias, it is float32."""
    match node:
        case ast.Name() if depth:
            value = _assigned_before(script, node.id, where)
            return value is not None and _is_promoted(script, value, script.program.statement(value), depth - 1)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return number(node.left) is None and number(node.right) is None
        case ast.BinOp():
            return any(_is_promoted(script, side, where, depth) for side in (node.left, node.right))
    return False


def rounds_to_0(script: Script) -> Iterator[Place]:
    """An epsilon is 0 in float16."""
    for total in script.program.every(ast.BinOp):
        if not isinstance(total.op, ast.Add):
            continue
        for side, other in ((total.left, total.right), (total.right, total.left)):
            value = number(side)
            if value is None or not 0 < value <= _ROUNDS_TO_0:
                continue
            if _is_low(script, other, total, 3) or _is_half(script, other):
                yield (
                    total,
                    f"{script.program.code(side)} is 0 in float16, whose least number is 6e-8, and so guards nothing "
                    "here; use 1e-6 or more, or compute this in float32",
                )


def _is_low(script: Script, node: ast.AST, where: ast.AST, depth: int) -> bool:
    """Return whether an expression is float16 by the text: the product of a casting region, or cast by hand."""
    match node:
        case ast.Name() if depth:
            value = _assigned_before(script, node.id, where)
            return value is not None and _is_low(script, value, where, depth - 1)
        case ast.BinOp(op=ast.MatMult()):
            return _is_cast(script, node)
        case ast.Call() if _casts_by_hand(node):
            return True
        case ast.Call() if script.names(node.func) & _PRODUCTS:
            return _is_cast(script, node)
        case ast.Call() if called_name(node) in _KEEP:
            owner = receiver(node)
            kept = [*node.args[:1], *([] if owner is None else [owner])]
            return any(_is_low(script, value, where, depth) for value in kept)
    return False


def _assigned_before(script: Script, name: str, where: ast.AST) -> ast.expr | None:
    """Return what a name was last assigned before a node of the same function."""
    values = [
        assign.value
        for assign in script.assignments_in(script.program.function(where))
        if script.comes_before(assign, where) and name in map(dotted, assign.targets)
    ]
    return values[-1] if values else None


def _casts_by_hand(call: ast.Call) -> bool:
    name = called_name(call)
    return name == "half" or (name in ("to", "astype", "cast", "type") and "float16" in map(dtype_of, call.args))


def _is_cast(script: Script, node: ast.AST) -> bool:
    region = script.region(node)
    return region is not None and region.enabled and region.dtype == "float16"


# -- what was cast by hand -------------------------------------------------------------------------


def of_half(script: Script) -> Iterator[Place]:
    """Squares, logarithms and reciprocal roots of values that were cast to float16 by hand."""
    if not any(map(_casts_by_hand, script.calls)):
        return
    operations: list[ast.expr] = [*script.program.every(ast.BinOp), *script.calls]
    for node in operations:
        what = _loses(script, node)
        if what and not _is_float32(script, node, None):
            yield node, f"`{script.program.code(node)}` is computed in float16, where {what}; compute this in float32"


def _loses(script: Script, node: ast.expr) -> str:
    """Return what an operation loses whose operand is float16 by hand; "" for any other."""
    square = _squared(script, node)
    if square is not None:
        return _SQUARES if _is_half(script, square) else ""
    operand = _operand(script, node) if isinstance(node, ast.Call) and called_name(node) in _LOST else None
    guarded = isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Add)  # by an epsilon; AMP303 looks at those
    return "" if operand is None or guarded or not _is_half(script, operand) else _LOST[called_name(node)]


def _squared(script: Script, node: ast.expr) -> ast.expr | None:
    """Return `x` of `x ** 2`, `x * x`, `x.pow(2)`, `torch.square(x)` and the like; None for anything else."""
    match node:
        case ast.BinOp(op=ast.Pow(), left=operand, right=ast.Constant(value=2)):
            return operand
        case ast.BinOp(op=ast.Mult(), left=operand, right=other) if ast.dump(operand) == ast.dump(other):
            return operand
        case ast.Call() if called_name(node) == "square":
            return _operand(script, node)
        case ast.Call(args=[*_, ast.Constant(value=2)]) if called_name(node) == "pow":
            return _operand(script, node)
    return None


def _operand(script: Script, call: ast.Call) -> ast.expr | None:
    """Return what a function or a method computes of: `x` in `torch.log(x)` and in `x.log()`."""
    owner = receiver(call)
    if owner is None or script.names(owner):  # a function, of a module
        return next(iter(call.args), None)
    return owner


def _is_half(script: Script, node: ast.AST) -> bool:
    """Return whether an expression is float16 by the text: cast by hand, and no region or float32 has a say in it."""
    region = script.region(node)
    return (region is None or not region.enabled) and _keeps_half(script, node)


def _keeps_half(script: Script, node: ast.AST) -> bool:
    match node:
        case ast.Name():
            value = _surely_assigned(script, node)
            return value is not None and _is_half(script, value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_half(script, operand)
        case ast.BinOp(left=left, right=right):
            sides = [side for side in (left, right) if number(side) is None]
            return bool(sides) and all(_is_half(script, side) for side in sides)
        case ast.Call():
            return _casts_by_hand(node) or _computes_in_half(script, node)
    return False


def _computes_in_half(script: Script, call: ast.Call) -> bool:
    """Return whether a call computes in the dtype of its operand, and that is float16."""
    if called_name(call) not in _IN_ITS_DTYPE or "dtype" in keywords(call):
        return False
    operand = _operand(script, call)
    return operand is not None and _is_half(script, operand)


def _surely_assigned(script: Script, name: ast.Name) -> ast.expr | None:
    """Return what a name holds for sure; None where a branch, a loop or something else than `=` has a say in it."""
    bindings = script.flow.bindings_at(script.flow.place(name))
    before = [binding for binding in bindings if script.is_before(binding.node, name)]
    last = max(before, key=lambda binding: script.program.order(binding.node), default=None)
    if last is None or last.statement is None or not _always_comes_before(script, last.statement, name):
        return None
    loops = script.program.loops(name)
    again = any(loop in loops for loop in script.program.loops(last.statement))  # it is bound in every pass
    may_change = len(before) < len(bindings) and loops and not again
    return None if may_change or last.statement is script.program.statement(name) else last.value
