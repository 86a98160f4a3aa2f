"""Planted faults in PaddlePaddle: ampx and the tensor checker of `paddle.amp.debugging`.

Eager Paddle casts nothing on a CPU: the faults are planted on the simulated GPU of the tests. What a step costs under
each tool is timed on the CPU, in float32.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from debuggers import Fault, Said, Tool, costs, heard, named, planted, written

TESTS = planted("paddle")
_CHILD = """
import json
import sys
import gpu
if not gpu.simulate("paddle"):
    sys.exit(2)
import debuggers_paddle
with open(sys.argv[1], "w") as file:  # Paddle's checker prints, some of it when the process ends
    json.dump(debuggers_paddle.find(), file)
"""


def _code(model: Any, name: str) -> list[Any]:
    layer = dict(model.named_sublayers())[name]
    if isinstance(layer, TESTS.Does):
        return list(written(layer.function))
    alike = sum(type(other) is type(layer) for other in model.sublayers())
    return [type(layer).forward] if alike == 1 and type(layer).__module__ == TESTS.__name__ else []


def _fault(name: str) -> Fault:
    make, kind, direction, module = TESTS.FAULTS[name]
    # All weights have grown: every module is the place.
    grown = kind == "learning rate"
    modules = tuple(name for name, _ in make()[0].named_sublayers()) if grown else (module,)
    return Fault(name, make, kind, modules, direction, lambda model: _code(model, module))


@functools.cache
def _checker() -> Any:
    """Return the checker's configuration, which prints and seeds all random numbers when it is made."""
    mode = paddle.amp.debugging.DebugMode.CHECK_NAN_INF_AND_ABORT
    with contextlib.redirect_stdout(io.StringIO()):
        return paddle.amp.debugging.TensorCheckerConfig(enable=True, debug_mode=mode)


@contextlib.contextmanager
def _checked(_: Any = None) -> Iterator[None]:
    paddle.amp.debugging.enable_tensor_checker(_checker())
    try:
        yield
    finally:
        paddle.amp.debugging.disable_tensor_checker()


def _by_checker(model: Any, step: Callable[[Any], Any], dtype: str, scale: float) -> Said:
    def compute() -> None:
        with paddle.amp.auto_cast(dtype=dtype):
            loss = step(model)
        (loss * scale).backward()

    with _checked():
        said = heard(compute, low_level=True)
    return said if said.trace else Said("")


TOOLS = (Tool("the tensor checker of paddle.amp.debugging", _by_checker, _checked),)


def _timed() -> tuple[Any, Callable[[Any], Any], Callable[[], object]]:
    paddle.seed(0)
    generator = np.random.default_rng(0)
    inputs = paddle.to_tensor(generator.standard_normal((256, 1024), np.float32))
    labels = paddle.to_tensor(generator.integers(0, 10, 256))
    layers = [layer for _ in range(4) for layer in (paddle.nn.Linear(1024, 1024), paddle.nn.ReLU())]
    model = paddle.nn.Sequential(*layers)
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())

    def step(model: Any) -> Any:
        return paddle.nn.functional.cross_entropy(model(inputs)[:, :10], labels)

    def train() -> None:
        step(model).backward()
        optimizer.step()
        optimizer.clear_grad()

    return model, step, train


STEPS = 4 + len(TOOLS)
"""How often `run` advances."""


def find() -> Any:
    """Return what each tool names, on a GPU."""
    paddle.set_device("gpu")
    faults = [_fault(name) for name in TESTS.FAULTS]
    return named("paddle", faults, list(TESTS.CLEAN.values()), TOOLS, lambda: None, "gpu")


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Try the tools on all faults, in a process that has the simulated GPU, and time them in this one.

    Paddle looks for devices when it is imported, and other parts of a run want none.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        command = [sys.executable, "-c", _CHILD, str(found)]
        subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL, check=True)
        counts, rows = json.loads(found.read_text())
    advance()
    return [*costs("paddle", counts, TOOLS, _timed, 8 if quick else 24, advance), *rows]
