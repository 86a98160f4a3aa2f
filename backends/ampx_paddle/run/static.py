"""Static graphs: `minimize` casts the program and builds the loss scale into it; and `import paddle.fluid`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final
from unittest import mock

import paddle

from ampx_paddle.graph_rewrite import cast_program

from .manager import Managed, Manager

_FLUID: Final = "paddle.fluid"


def minimize(manager: Manager, managed: Managed, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what a script's `minimize` asks for in a static graph."""
    if name != "minimize":
        return manager.work(managed, lambda: getattr(managed.wrapped, name)(*args, **kwargs))
    loss = args[0] if args else kwargs["loss"]
    named = dict(zip(("startup_program", "parameters", "no_grad_set"), args[1:], strict=False))
    options = {**named, **{key: value for key, value in kwargs.items() if key != "loss"}}
    # fluid's name; and programs of fluid stand for Paddle's
    if "parameter_list" in options:
        options["parameters"] = options.pop("parameter_list")
    startup = getattr(options.get("startup_program"), "program", options.get("startup_program"))
    options["startup_program"] = startup
    plan = manager.run.session().plan
    manager.run.lines = (
        f"amp = ampx.init('paddle', dtype={manager.run.session().effective.dtype or 'float32'!r})  # before the model",
        "optimizer = ampx.wrap_optimizer(optimizer)",
        "optimizer.minimize(loss)",
    )

    def build() -> Any:
        with paddle.static.program_guard(loss.block.program, startup):
            if plan is not None:
                cast_program(loss.block.program, plan.dtype)
            return managed.wrapped.minimize(loss, **options)

    return manager.work(managed, build)


@contextmanager
def programs_watched(manager: Manager) -> Iterator[None]:
    """Patch the executor, which alone sees a program's steps; offer the alias of `paddle.fluid` to who asks for it."""
    native = paddle.static.Executor.run
    recorder = manager.run.recorder

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if manager.run.amp is None or paddle.in_dynamic_mode():
            return native(self, *args, **kwargs)
        with recorder.phase("train"):
            result = native(self, *args, **kwargs)
        manager.ran()
        if result or not paddle.is_compiled_with_cuda():  # what fetches has waited for the device already
            manager.look()
        return result

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        with mock.patch.object(paddle.static.Executor, "run", run):
            yield
        manager.look()
        if manager.decorated:
            manager.run.stood_down = "paddle.fluid.contrib.mixed_precision.decorate"
            manager.run.lines = ("the script has it by hand: its own calls decide",)
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        if finder.asked:
            from ampx_paddle.old import fluid

            fluid.uninstall()


class _Finder(importlib.abc.MetaPathFinder):
    """Installs the alias when a script asks for it."""

    def __init__(self) -> None:
        self.asked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _FLUID or self.asked:
            return None
        self.asked = True
        from ampx_paddle.old import fluid

        fluid.install()
        return importlib.machinery.ModuleSpec(fullname, _Provided(sys.modules[fullname]), is_package=True)


class _Provided(importlib.abc.Loader):
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it ran when it was made
