"""Read constants in code, and write the loss scale they configure."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
LOWEST, HIGHEST = 1.0, 2.0**24


def number(text: str) -> float | None:
    """Return the value of a number or of sums, products and powers of some; None for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 200:
            raise ValueError("too large a power")
        value: float = _OPERATORS[type(node.op)](left, right)
        return value
    raise ValueError("not a number")


def as_bool(code: str) -> str:
    """Write code of a switch so that it gives a bool; a comparison or negation does."""
    expression = ast.parse(f"({code})", mode="eval").body
    if isinstance(expression, (ast.Compare, ast.UnaryOp)):
        return f"({code})"
    return code if code in ("True", "False") else f"bool({code})"


def loss_scale(settings: Mapping[str, str]) -> str:
    """Write `ampx.LossScale(...)` for settings by field, as code; bounds are widened where the scale needs it."""
    settings = dict(settings)
    first = number(settings.get("init_scale", "")) if "init_scale" in settings else None
    if first is not None and first > HIGHEST:
        settings.setdefault("max_scale", "2.0**127")  # as far as the script's own would grow
    if first is not None and first < LOWEST:
        settings.setdefault("min_scale", settings["init_scale"])
    return f"ampx.LossScale({', '.join(f'{name}={value}' for name, value in settings.items())})"
