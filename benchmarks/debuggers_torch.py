"""Planted faults in PyTorch: ampx, DebugUnderflowOverflow, PyTorch's anomaly mode and mixed-precision-nanny."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _paired import limited
from debuggers import Fault, Said, Tool, compared, heard, planted, written
from workloads import WORKLOADS

PLANTED = planted("torch")


def _code(model: Any, name: str) -> list[Any]:
    module = model.get_submodule(name)
    if isinstance(module, PLANTED.Lambda):
        return list(written(module.function))
    alike = sum(type(each) is type(module) for each in model.modules())
    return [type(module).forward] if alike == 1 and type(module).__module__ == PLANTED.__name__ else []


def _fault(name: str) -> Fault:
    make, kind, direction, module = PLANTED.FAULTS[name]
    # All weights have grown: every module is the place.
    modules = tuple(name for name, _ in make()[0].named_modules()) if kind == "learning rate" else (module,)
    return Fault(name, make, kind, modules, direction, lambda model: _code(model, module))


def _compute(model: Any, step: Callable[[Any], Any], dtype: str, scale: float) -> None:
    with torch.autocast("cpu", getattr(torch, dtype)):
        loss = step(model)
    (loss * scale).backward()


@contextlib.contextmanager
def _hooked(model: Any) -> Iterator[None]:
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: list(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model)
    try:
        yield
    finally:
        for module, keys in before.items():
            for key in list(module._forward_hooks):
                if key not in keys:
                    del module._forward_hooks[key]


def _by_hugging_face(model: Any, step: Callable[[Any], Any], dtype: str, scale: float) -> Said:
    with _hooked(model):
        said = heard(lambda: _compute(model, step, dtype, scale))
    if not said.anything:
        return said
    # The last frame is the one that it stops at: "<module> <class>", then its tensors.
    names = {name for name, _ in model.named_modules()}
    frames = list(re.finditer(r"^ {17} *(\S*) (\w+)$", said.words, re.MULTILINE))
    last = next(frame for frame in reversed(frames) if frame[1] in names)
    return Said(said.words[last.start() :], said.trace, last[1])


def _by_anomaly_mode(model: Any, step: Callable[[Any], Any], dtype: str, scale: float) -> Said:
    with torch.autograd.set_detect_anomaly(True):
        said = heard(lambda: _compute(model, step, dtype, scale))
    return Said(said.words.replace("Anomaly Detection has been enabled", ""), said.trace) if said.trace else Said("")


@contextlib.contextmanager
def _nursed(model: Any) -> Iterator[None]:
    """Do a step under the nanny that looks at a model, which is made with its database before the first."""
    from mixed_precision_nanny import MixedPrecisionNanny

    if model not in _NANNIES:
        folder = tempfile.TemporaryDirectory()
        nanny = MixedPrecisionNanny(model, trace_interval=1, output_dir=folder.name, verbose=False)
        _NANNIES[model] = folder, nanny
    with _NANNIES[model][1].step(0):
        yield


def _by_nanny(model: Any, step: Callable[[Any], Any], dtype: str, scale: float) -> Said:
    from mixed_precision_nanny import MixedPrecisionNanny

    def compute() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            MixedPrecisionNanny(model, trace_interval=1, output_dir=folder) as nanny,
            nanny.step(0),
        ):
            _compute(model, step, dtype, scale)

    # It prints every module that has something, in order, and goes on: what it calls an error first is its answer.
    said = heard(compute)
    errors = re.findall(r"^\[Nanny\]\[ERROR\] step=0 \| (.*)$", said.words, re.MULTILINE)
    if not errors:
        return Said("", said.trace)
    return Said(errors[0], module=errors[0].split("] ")[1].partition(": ")[0])


_HUGGING_FACE = "Hugging Face's DebugUnderflowOverflow"
_NANNY = "mixed-precision-nanny"
_NANNIES: dict[Any, tuple[Any, Any]] = {}
TOOLS = (
    Tool(_HUGGING_FACE, _by_hugging_face, _hooked)
    if importlib.util.find_spec("transformers")
    else Tool(_HUGGING_FACE, missing="transformers is not installed"),
    Tool("torch.autograd.set_detect_anomaly", _by_anomaly_mode, lambda _: torch.autograd.set_detect_anomaly(True)),
    Tool(_NANNY, _by_nanny, _nursed)
    if importlib.util.find_spec("mixed_precision_nanny")
    else Tool(_NANNY, missing="mixed-precision-nanny is not installed"),
)


def _timed() -> tuple[Any, Callable[[Any], Any], Callable[[], object]]:
    torch.manual_seed(0)
    workload = next(each for each in WORKLOADS if each.name.startswith("transformer"))
    inputs, labels = workload.batch()
    model = workload.model()
    optimizer = workload.optimizer(list(model.parameters()))

    def step(model: Any) -> Any:
        return workload.loss(model(inputs), labels)

    def train() -> None:
        optimizer.zero_grad()
        _compute(model, step, "bfloat16", 1.0)
        optimizer.step()

    return model, step, train


STEPS = len(PLANTED.FAULTS) + 3 + sum(not tool.missing for tool in TOOLS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Try the tools on all faults, and time them."""
    faults = [_fault(name) for name in limited(PLANTED.FAULTS)]
    return compared("torch", faults, limited(PLANTED.CLEAN.values()), TOOLS, _timed, 8 if quick else 24, advance)
