"""Hugging Face's DebugUnderflowOverflow, and `set_detect_anomaly`, in PyTorch's own mixed precision: see `others.py`.

The loss scale halves itself as in `native_torch.py`.
"""

import re
import sys

import torch
from native_torch import DTYPES, Watch
from others import answer, lines_in, said_by
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


def watched_by_transformers(watch):
    """Attach Hugging Face's DebugUnderflowOverflow to every model when it is first called."""
    from transformers.debug_utils import DebugUnderflowOverflow

    call, attached = nn.Module.__call__, set()

    def __call__(module, *args, **kwargs):  # noqa: N807
        if not watch.stack and module not in attached:
            attached.update(module.modules())
            DebugUnderflowOverflow(module)
        return call(module, *args, **kwargs)

    nn.Module.__call__ = __call__


def main():
    tool, dtype, script, *options = sys.argv[1:]
    watch = Watch([], 1024.0)
    nn.Module.__call__ = watch.call(nn.Module.__call__)
    torch.Tensor.backward = watch.backward_of(torch.Tensor.backward)
    register_optimizer_step_pre_hook(watch.before_step)
    register_optimizer_step_post_hook(watch.after_step)
    if tool == "DebugUnderflowOverflow":
        watched_by_transformers(watch)
    torch.autograd.set_detect_anomaly(tool == "set_detect_anomaly")
    with torch.autocast("cpu", DTYPES[dtype], cache_enabled=False):
        text = said_by(script, options)
    modules = re.findall(r"^\s+([\w.]+) \w+$", text, re.M) if "Detected inf/nan" in text else []
    lines = lines_in(script, text)
    raises = "Traceback" in text and "debug_utils.py" not in text  # not the tool itself, which knows no masks of bool
    blamed = bool(modules) or "returned nan values" in text or raises
    line = lines[0 if "Error detected in" in text else -1] if lines else None
    answer(script, text, blamed=blamed, module=modules[-1] if modules else None, line=line)


if __name__ == "__main__":
    main()
