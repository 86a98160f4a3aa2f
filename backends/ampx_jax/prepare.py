"""What `prepare` does: parameters in low precision at O2 and O3, those of normalization in float32 at O2.

Parameters are values, so which belong to a normalization is read off what is there. At O2 these stay in float32:

- all parameters of a module whose class, or a class that it inherits from, ends in `Norm`, where the tree has modules
  (flax nnx, equinox);
- parameters below a name with a word of `NORMS` in it: `LayerNorm_0`, `norm`, `batch_norm`, `ln_1`, `bn2`, ...;
- parameters next to a `scale` or `gamma`, if nothing but what a normalization has is there, such as `bias`.

Where this is wrong, `allow` and `deny` of `init` decide: `"module:pattern"` matches the name of a parameter or of
anything that it is in, with dots, and the innermost match holds.

Running statistics of flax (the collection `batch_stats`, variables that are no `nnx.Param`) are no parameters: flax
writes float32 into them, and they stay what they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx.backend import CastPlan
from ampx.modules import check_patterns, module_dtypes

from . import state as states
from .casting import is_array
from .scopes import dtype_for

NORMS: Final = frozenset(
    {"norm", "norms", "normalization", "layernorm", "batchnorm", "groupnorm", "instancenorm", "rmsnorm"}
    | {"ln", "bn", "gn"}
)
_SCALES: Final = frozenset({"scale", "gamma"})
_OF_A_NORM: Final = _SCALES | {"bias", "beta", "offset", "mean", "var", "moving_mean", "moving_variance"}
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PARAMETERS: Final = "params"  # of flax linen, like the next: no module is called like them
_STATISTICS: Final = "batch_stats"

Path = tuple[str, ...]


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Return a model whose parameters have the dtypes of the level; a module of flax nnx is changed in place.

    Args:
        model: A tree of parameters (a module of equinox is one), or a module of flax nnx.
        optimizer: What else is there: a transformation, raw or wrapped, an optimizer state, or an `nnx.Optimizer`. It
            stays as it is, because a state has float32 copies of its own from its `init` on.
        plan: The session's.

    Raises:
        InvalidOptionError: One of the two is something else.
        ProtocolError: The state is of an optimizer that was wrapped at another level.
        UnsupportedOpError: A pattern of `allow` or `deny` matches nothing.
    """
    if optimizer is not None:
        _check_optimizer(optimizer, plan)
    if plan.level in ("O2", "O3"):
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and isinstance(model, nnx.Module):
            _lower_in_place(nnx, model, plan)
        else:
            model = _lowered_tree(model, plan)
    return model if optimizer is None else (model, optimizer)


def lowered(tree: Any, plan: CastPlan) -> list[bool]:
    """Return which leaves of a tree `prepare` gives the low dtype."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    norms = [path for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_norm)[0] if _is_norm(node)]
    chosen = _chosen([_names(path) for path, _ in leaves], [_names(path) for path in norms], plan)
    return [low and _is_full(leaf) for low, (_, leaf) in zip(chosen, leaves, strict=True)]


def _check_patterns(paths: Iterable[Path], plan: CastPlan) -> None:
    check_patterns("prepare", module_dtypes(plan), sorted({name for path in paths for name in _inside(path)}))


def _lowered_tree(tree: Any, plan: CastPlan) -> Any:
    if not any(is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(tree)):
        raise ampx.InvalidOptionError(
            f"prepare got {type(tree).__name__} as the model, which holds no floating array; accepted: a tree of "
            f"parameters, or a module of flax nnx or equinox. Pass that."
        )
    _check_patterns([_names(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]], plan)
    return lower(tree, plan)


def lower(tree: Any, plan: CastPlan) -> Any:
    """Return a tree with the dtypes of the level."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, lowered(tree, plan), strict=True)
    return structure.unflatten(jnp.asarray(leaf).astype(plan.dtype) if low else leaf for leaf, low in pairs)


def _lower_in_place(nnx: Any, model: Any, plan: CastPlan) -> None:
    norms = [tuple(map(str, path)) for path, module in nnx.iter_modules(model) if _is_norm(module)]
    variables = [(path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]
    paths = [tuple(map(str, path)) for path, _ in variables]
    _check_patterns(paths, plan)
    chosen = _chosen(paths, norms, plan)
    for low, (_, variable) in zip(chosen, variables, strict=True):
        value = variable.get_value()
        if low and _is_full(value):
            variable.set_value(value.astype(plan.dtype))


def _chosen(paths: list[Path], norms: list[Path], plan: CastPlan) -> list[bool]:
    """Return which parameters become low, by their names and the names of the modules that are normalizations."""
    patterns = module_dtypes(plan)
    names = [_inside(path) for path in paths]
    within: dict[Path, set[str]] = {}
    for path in paths:
        within.setdefault(path[:-1], set()).add(path[-1] if path else "")

    def is_low(path: Path, chain: list[str]) -> bool:
        for name in chain:
            dtype = dtype_for(name, tuple(patterns.items()))
            if dtype is not None:
                return dtype != "float32"
        if path and path[0] == _STATISTICS:
            return False
        if plan.level == "O3":
            return True
        siblings = within[path[:-1]]
        beside_a_scale = bool(siblings & _SCALES) and siblings <= _OF_A_NORM
        named = any(not NORMS.isdisjoint(_words(key)) for key in path)
        return not (named or beside_a_scale or any(path[: len(norm)] == norm for norm in norms))

    return [is_low(path, chain) for path, chain in zip(paths, names, strict=True)]


def _inside(path: Path) -> list[str]:
    """Return the name of a parameter and of all that it is in, the innermost first."""
    own = path[1:] if path and path[0] in (_PARAMETERS, _STATISTICS) else path
    return [".".join(own[:length]) for length in range(len(own), 0, -1)]


def _words(key: str) -> Iterable[str]:
    return (word.lower() for word in _WORDS.findall(key))


def _names(path: Any) -> Path:
    """Return the keys on the way to a leaf; that of a variable of flax nnx is none."""
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return keys[:-1] if len(keys) > 1 and keys[-1] in ("value", "raw_value") else keys


def _is_norm(node: Any) -> bool:
    return any(kind.__name__.endswith("Norm") for kind in type(node).__mro__)


def _is_full(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype == jnp.float32


def _check_optimizer(optimizer: Any, plan: CastPlan) -> None:
    if isinstance(optimizer, optax.GradientTransformation):
        return
    own = states.find_all(optimizer)
    if not own:
        raise ampx.InvalidOptionError(
            f"prepare got {type(optimizer).__name__} as the optimizer; accepted: an optax transformation, the state "
            f"of a wrapped one, or an nnx.Optimizer around it. Pass that, or nothing."
        )
    if plan.level == "O2" and any(state.masters is None and state.settings.enabled for state in own):
        raise ampx.ProtocolError(
            "prepare got the state of an optimizer that was wrapped at another level, so that it holds no float32 "
            "copies; accepted: a state that was initialised at level='O2'. Call wrap_optimizer and its init again."
        )
