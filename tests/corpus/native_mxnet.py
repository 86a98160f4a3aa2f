"""What a script of MXNet does in MXNet's own mixed precision on a simulated GPU, without ampx: see `native_torch.py`.

python tests/corpus/native_mxnet.py float16 tests/corpus/scripts/mxnet/multiplied_norm.py
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np

np.bool, np.int = getattr(np, "bool", bool), int  # without which MXNet cannot be imported
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "kit"))

import simulated_mxnet  # noqa: E402

simulated_mxnet.start(HERE.parents[1] / ".pytest_cache" / "simulated-cuda")

import mxnet as mx  # noqa: E402
from mxnet import gluon  # noqa: E402
from mxnet.contrib import amp  # noqa: E402

from corpus import options_of  # noqa: E402


def is_finite(tree):
    if isinstance(tree, mx.nd.NDArray):
        return bool(np.isfinite(tree.astype("float32").asnumpy()).all())
    return all(map(is_finite, tree)) if isinstance(tree, (list, tuple)) else True


def run(script, options, dtype):
    if dtype != "float32":
        amp.init(dtype)
    broken, call = [], gluon.Block.__call__

    def __call__(block, *args):  # noqa: N807
        result = call(block, *args)
        if len(broken) < 3 and not is_finite(result) and is_finite(args):
            broken.append(block.name)
        return result

    gluon.Block.__call__ = __call__
    sys.argv, printed = [script, *options], io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    losses = json.loads(printed.getvalue().splitlines()[-1])
    print(f"   {dtype}:", " ".join(f"{loss:.4g}" for loss in losses), broken, flush=True)


def main():
    dtype, *scripts = sys.argv[1:]
    if dtype.startswith("--"):
        run(scripts[0], scripts[1:], dtype[2:])
        return
    for script in scripts:
        print("==", os.path.basename(script), dtype, flush=True)
        for options in options_of(script):
            for how in ("float32", dtype):
                subprocess.run([sys.executable, __file__, f"--{how}", script, *options], check=False)


if __name__ == "__main__":
    main()
