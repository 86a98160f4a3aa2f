"""Static graphs: `minimize` casts the program and builds the loss scale into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import paddle

from ampx_paddle import casting
from ampx_paddle.graph_rewrite import cast_program
from ampx_paddle.static import GraphLedger, StaticOptimizer

from .manager import PaddleManaged, PaddleManager


def minimize(
    manager: PaddleManager, managed: PaddleManaged, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what a script's `minimize` asks for in a static graph."""
    if name != "minimize":
        with manager.working(managed):
            return getattr(managed.wrapped, name)(*args, **kwargs)
    if manager.scales:
        manager.check_programs()
    options = _options(args, kwargs)
    loss = options.pop("loss")
    amp = manager.run.session()
    manager.run.lines = (
        f"{manager.run.init_call()}  # before the model",
        "optimizer = ampx.wrap_optimizer(optimizer)",
        "optimizer.minimize(loss)",
    )
    programs = paddle.static.program_guard(loss.block.program, options["startup_program"])
    with manager.working(managed), programs:
        if amp.plan is not None:
            # What is not on Paddle's list computes in float32 here, as "*" asks for.
            deny = [name for name in amp.plan.deny if name != casting.EVERYTHING_ELSE]
            cast_program(loss.block.program, amp.plan.dtype, amp.plan.allow, deny)
        return managed.wrapped.minimize(loss, **options)


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `minimize` by Paddle's names; fluid has others, names of parameters, and programs."""
    options = {**dict(zip(("loss", "startup_program", "parameters", "no_grad_set"), args, strict=False)), **kwargs}
    if "parameter_list" in options:
        options["parameters"] = options.pop("parameter_list")
    if options.get("parameters") is not None:
        by_name = options["loss"].block.program.get_parameter_value_by_name
        options["parameters"] = [by_name(item) if isinstance(item, str) else item for item in options["parameters"]]
    startup = options.get("startup_program")
    return {**options, "startup_program": getattr(startup, "program", startup)}


@contextmanager
def programs_watched(manager: PaddleManager) -> Iterator[None]:
    """Patch the executor, which alone sees a program's steps."""
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

    build = StaticOptimizer.minimize
    built: list[StaticOptimizer] = []  # a program counts its steps also where the script forgets its optimizer

    def minimize_observed(self: StaticOptimizer, loss: Any, *args: Any, **options: Any) -> Any:
        result = build(self, loss, *args, **options)
        built.append(self)
        ledger = self.ampx_member.group.ledger
        if recorder.reads_losses and isinstance(ledger, GraphLedger):
            with casting.off():
                ledger.keep_loss(loss)
        return result

    with (
        mock.patch.object(paddle.static.Executor, "run", run),
        mock.patch.object(StaticOptimizer, "minimize", minimize_observed),
    ):
        yield
    manager.look()
    if manager.decorated:
        manager.run.stood_down = "paddle.fluid.contrib.mixed_precision.decorate"
        manager.run.lines = ("the script has it by hand: its own calls decide",)
