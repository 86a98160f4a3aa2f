"""A small `paddle.fluid`: what static-graph training scripts with mixed precision use of it, on Paddle 3.

`install()` makes `import paddle.fluid as fluid` give this package, with static graphs switched on as in those days;
`fluid.contrib.mixed_precision.decorate` trains with ampx's loss scale. `uninstall()` undoes it. A name that is not here
is refused by name, with what there is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

import paddle
from paddle.base import (
    BuildStrategy,
    CPUPlace,
    CUDAPinnedPlace,
    CUDAPlace,
    ParamAttr,
    core,
    cpu_places,
    create_lod_tensor,
    create_random_int_lodtensor,
    cuda_pinned_places,
    cuda_places,
    get_flags,
    is_compiled_with_cuda,
    require_version,
    set_flags,
    unique_name,
)

from ampx.policy import normalise_dtype

from . import clip, contrib, initializer, io, layers, nets, optimizer, regularizer
from .executor import DataFeeder, Executor, LoDTensor
from .io import load, save
from .missing import FluidNameError, refuse_missing
from .programs import (
    CompiledProgram,
    Program,
    Scope,
    default_main_program,
    default_startup_program,
    global_scope,
    name_scope,
    program_guard,
    scope_guard,
)
from .script import forget as _forget_scripts

__all__ = [
    "BuildStrategy",
    "CPUPlace",
    "CUDAPinnedPlace",
    "CUDAPlace",
    "CompiledProgram",
    "DataFeeder",
    "Executor",
    "FluidNameError",
    "LoDTensor",
    "ParamAttr",
    "Program",
    "Scope",
    "clip",
    "contrib",
    "core",
    "cpu_places",
    "create_lod_tensor",
    "create_random_int_lodtensor",
    "cuda_pinned_places",
    "cuda_places",
    "data",
    "default_main_program",
    "default_startup_program",
    "embedding",
    "get_flags",
    "global_scope",
    "initializer",
    "install",
    "io",
    "is_compiled_with_cuda",
    "layers",
    "load",
    "name_scope",
    "nets",
    "optimizer",
    "program_guard",
    "regularizer",
    "require_version",
    "save",
    "scope_guard",
    "set_flags",
    "uninstall",
    "unique_name",
]

_NAME: Final = "paddle.fluid"
_before: Final[dict[str, Any]] = {}


def data(name: str, shape: Any, dtype: str = "float32", lod_level: int = 0) -> Any:
    """Return an input of the program; the shape holds the batch, as None or -1. `lod_level` is 0."""
    layers.check_level(lod_level)
    return paddle.static.data(name, shape, dtype)


def embedding(
    input: Any,
    size: Any,
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """Look rows up, for numbers of any shape; see `layers.embedding`, which takes the last axis away."""
    rows = paddle.unsqueeze(input, -1)
    return layers.embedding(rows, size, is_sparse, is_distributed, padding_idx, param_attr, dtype)


def install(dtype: str = "auto") -> None:
    """Make `import paddle.fluid` give this package, and switch static graphs on.

    Args:
        dtype: What decorated optimizers compute in. `"auto"`: float16 on a GPU with Tensor Cores, bfloat16 on a CPU
            that computes it natively, else float32, with a warning. A script cannot say it: fluid had float16 alone.

    Raises:
        UnsupportedDtypeError: The dtype is unknown.
    """
    contrib.mixed_precision.decorator.choose_dtype(dtype if dtype == "auto" else normalise_dtype(dtype))
    _forget_scripts()
    if _before:
        return
    _before["eager"] = paddle.in_dynamic_mode()
    _before["fluid"] = vars(paddle).get("fluid")
    alias = {**modules(_NAME), f"{_NAME}.core": core, f"{_NAME}.unique_name": unique_name}
    _before["modules"] = {name: sys.modules.get(name) for name in alias}
    sys.modules.update(alias)
    paddle.fluid = sys.modules[__name__]
    paddle.enable_static()


def uninstall() -> None:
    """Undo `install`."""
    if not _before:
        return
    contrib.mixed_precision.decorator.choose_dtype("auto")
    for name, module in _before["modules"].items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
    if _before["fluid"] is None:
        del paddle.fluid
    else:
        paddle.fluid = _before["fluid"]
    if _before["eager"]:
        paddle.disable_static()
    _before.clear()


def modules(name: str) -> dict[str, ModuleType]:
    """Return this package and its modules by the names that they have where the package has this one."""
    own = {__name__: sys.modules[__name__]}
    own |= {path: module for path, module in sys.modules.items() if path.startswith(f"{__name__}.")}
    own |= {f"{__name__}.layers.{former}": layers for former in layers.FORMER}
    return {path.replace(__name__, name, 1): module for path, module in own.items()}


__getattr__ = refuse_missing(__name__)
