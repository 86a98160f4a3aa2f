"""Other tools on a script of PyTorch in PyTorch's own mixed precision: what they print, as text.

    python tests/corpus/others_torch.py set_detect_anomaly float16 SCRIPT [--twin]

The loss scale halves itself as in `native_torch.py`. The last line is JSON: the module that the tool names, or the last
line of the script in what it says, and its words.
"""

import contextlib
import io
import json
import re
import runpy
import sys
import traceback
import warnings

import torch
from native_torch import DTYPES, Watch
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
    sys.argv, said = [script, *options], io.StringIO()
    casting = torch.autocast("cpu", DTYPES[dtype], cache_enabled=False)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), casting, warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:
            traceback.print_exc()
    text = said.getvalue()
    modules = re.findall(r"^\s+([\w.]+) \w+$", text, re.M) if "Detected inf/nan" in text else []
    lines = re.findall(rf'File "{re.escape(script)}", line (\d+)', text)
    blamed = bool(modules) or "returned nan values" in text or "Traceback" in text
    line = f"{script}:{lines[0 if 'Error detected in' in text else -1]}" if blamed and lines else ""
    print(
        json.dumps({"module": modules[-1] if modules else None, "line": line, "blamed": blamed, "said": text[-1500:]})
    )


if __name__ == "__main__":
    main()
