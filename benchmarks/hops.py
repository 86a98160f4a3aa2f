"""How many calls and files of ampx one training step touches, by framework: what a reader has to follow.

`python benchmarks/hops.py` counts for every framework that can be imported and prints a table; `--json` prints JSON.
Nothing is timed. One small model, bfloat16 casting where the CPU has it, a dynamic loss scale and `max_grad_norm=1`,
after two steps to warm up. The files of a whole step are those that `scale_loss`, backward and `step` touch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import ampx


class Parts(NamedTuple):
    """The parts of a training step of one framework.

    Attributes:
        wrap: Wraps a fresh optimizer.
        block: Runs forward, `scale_loss` and backward.
        step: Steps the optimizer.
        last_step: Asks for the result.
        compiled: The block and the step as the framework compiles them; None where it does not.
    """

    wrap: Callable[[], Any]
    block: Callable[[], Any]
    step: Callable[[], Any]
    last_step: Callable[[], Any]
    compiled: Callable[[], Any] | None = None


class Count:
    """The calls inside ampx since it was entered.

    Attributes:
        calls: How many functions of ampx were called.
        files: The files that they stand in.
        switches: How often a call went from one file to another.
    """

    def __init__(self) -> None:
        """Look for the folders of ampx and of its backends."""
        names = (
            "ampx",
            "ampx_apex",
            "ampx_fluid",
            "ampx_torch",
            "ampx_tensorflow",
            "ampx_mxnet",
            "ampx_paddle",
            "ampx_jax",
        )
        specs = [find_spec(name) for name in names]
        self._roots = tuple(str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin)
        self.calls, self.switches, self.files = 0, 0, set[str]()
        self._file = ""

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        """Count one call; `sys.setprofile` takes it."""
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self._roots):
            self.calls += 1
            self.files.add(file)
            self.switches += file != self._file
            self._file = file

    @contextmanager
    def counting(self) -> Any:
        """Count the calls of the body."""
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)


def _torch() -> Parts:
    import torch

    amp = ampx.init("torch", device="cpu", dtype="bfloat16", loss_scale="dynamic", on_unsupported="warn")
    model = torch.nn.Linear(4, 1)
    inputs = torch.ones(2, 4)

    def wrap() -> Any:
        return amp.wrap_optimizer(torch.optim.AdamW(model.parameters()), max_grad_norm=1.0)

    optimizer = wrap()

    def block() -> None:
        optimizer.zero_grad()
        with ampx.scale_loss(model(inputs).square().mean(), optimizer) as scaled:
            scaled.backward()

    return Parts(wrap, block, optimizer.step, lambda: optimizer.last_step)


def _tensorflow() -> Parts:
    import keras
    import tensorflow as tf

    amp = ampx.init("tensorflow", device="cpu", dtype="bfloat16", loss_scale="dynamic", on_unsupported="warn")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    inputs = tf.ones((2, 4))
    gradients: list[Any] = []

    def wrap() -> Any:
        return amp.wrap_optimizer(keras.optimizers.AdamW(), max_grad_norm=1.0)

    optimizer = wrap()

    def block() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(inputs), tf.float32)))
            with ampx.scale_loss(loss, optimizer) as scaled:
                pass
        gradients[:] = tape.gradient(scaled, model.trainable_variables)

    def step() -> None:
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def compiled() -> None:
        block()
        step()

    return Parts(wrap, block, step, lambda: optimizer.last_step, compiled)


def _mxnet() -> Parts:
    from ampx_mxnet.compat import mx

    amp = ampx.init("mxnet", device="cpu", dtype="bfloat16", loss_scale="dynamic", on_unsupported="warn")
    model = mx.gluon.nn.Dense(1, in_units=4)
    model.initialize()
    inputs = mx.nd.ones((2, 4))

    def wrap() -> Any:
        return amp.wrap_optimizer(mx.gluon.Trainer(model.collect_params(), "adam", {}), max_grad_norm=1.0)

    trainer = wrap()

    def block() -> None:
        with mx.autograd.record():
            loss = (model(inputs) ** 2).mean()
            with ampx.scale_loss(loss, trainer) as scaled:
                scaled.backward()

    return Parts(wrap, block, lambda: trainer.step(1), lambda: trainer.last_step)


def _paddle() -> Parts:
    import paddle

    amp = ampx.init("paddle", device="cpu", level="O0", loss_scale="dynamic")
    model = paddle.nn.Linear(4, 1)
    inputs = paddle.ones([2, 4])

    def wrap() -> Any:
        return amp.wrap_optimizer(paddle.optimizer.AdamW(parameters=model.parameters()), max_grad_norm=1.0)

    optimizer = wrap()

    def block() -> None:
        optimizer.clear_grad()
        with ampx.scale_loss(model(inputs).square().mean(), optimizer) as scaled:
            scaled.backward()

    return Parts(wrap, block, optimizer.step, lambda: optimizer.last_step)


def _jax() -> Parts:
    import jax
    import jax.numpy as jnp
    import optax

    amp = ampx.init("jax", device="cpu", dtype="bfloat16", loss_scale="dynamic", on_unsupported="warn")
    inputs = jnp.ones((2, 4))
    now: dict[str, Any] = {"params": {"w": jnp.ones((4, 1))}}

    def wrap() -> Any:
        return amp.wrap_optimizer(optax.adamw(1e-3), max_grad_norm=1.0)

    tx = wrap()
    now["state"] = tx.init(now["params"])

    def block() -> None:
        def scaled_loss(params: Any) -> Any:
            loss = jnp.mean((inputs @ params["w"]) ** 2)
            with ampx.scale_loss(loss, now["state"]) as scaled:
                return scaled

        now["gradients"] = jax.grad(scaled_loss)(now["params"])

    def step() -> None:
        updates, now["state"] = tx.update(now["gradients"], now["state"], now["params"])
        now["params"] = optax.apply_updates(now["params"], updates)

    @jax.jit
    def train(params: Any, state: Any) -> Any:
        def scaled_loss(params: Any) -> Any:
            with ampx.scale_loss(jnp.mean((inputs @ params["w"]) ** 2), state) as scaled:
                return scaled

        updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def compiled() -> None:
        now["params"], now["state"] = jax.block_until_ready(train(now["params"], now["state"]))

    return Parts(wrap, block, step, lambda: ampx.last_step(now["state"]), compiled)


FRAMEWORKS = {"torch": _torch, "tensorflow": _tensorflow, "mxnet": _mxnet, "paddle": _paddle, "jax": _jax}


def count(framework: str) -> dict[str, dict[str, int]]:
    """Count calls, files and switches between files for each part of a step, and for a whole step."""
    parts = FRAMEWORKS[framework]()
    for _ in range(2):
        parts.block()
        parts.step()
        parts.last_step()
    counts = {name: Count() for name in ("wrap", "block", "step", "last_step", "whole step")}
    for name in ("wrap", "block", "step", "last_step"):
        with counts[name].counting():
            getattr(parts, name)()
    with counts["whole step"].counting():
        parts.block()
        parts.step()
    return {
        name: {"calls": part.calls, "files": len(part.files), "switches": part.switches}
        for name, part in counts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    present = [name for name in FRAMEWORKS if find_spec(name) is not None]
    results = {name: count(name) for name in present}
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    table = Table("framework", "part", "calls", "files", "switches between files")
    for framework, parts in results.items():
        for part, numbers in parts.items():
            table.add_row(framework, part, *map(str, numbers.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
