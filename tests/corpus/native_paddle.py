"""What a script of Paddle does in Paddle's own mixed precision on a simulated GPU, without ampx: see `native_torch.py`.

python tests/corpus/native_paddle.py float16 tests/corpus/scripts/paddle/added_mask.py@0.attention
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "kit"))

import simulated_paddle  # noqa: E402

simulated_paddle.start(HERE.parents[1] / ".pytest_cache" / "simulated-cuda")

import paddle  # noqa: E402
from paddle import nn  # noqa: E402

from corpus import options_of  # noqa: E402


def floats(tree):
    if isinstance(tree, paddle.Tensor):
        return [tree] if "float" in str(tree.dtype) else []
    values = tree.values() if isinstance(tree, dict) else tree
    return [leaf for value in values for leaf in floats(value)] if isinstance(tree, (dict, list, tuple)) else []


def is_finite(tensor):
    return bool(paddle.isfinite(tensor.astype("float32")).all())


def run(script, options, dtype, kept):
    paddle.set_device("gpu")
    names, depth, broken, call = {}, [], [], nn.Layer.__call__

    def __call__(layer, *args, **kwargs):  # noqa: N807
        if layer not in names:
            names.setdefault(layer, "")
            for name, child in layer.named_sublayers():
                names.setdefault(child, name)
        depth.append(layer)
        wide = names[layer] in kept
        try:
            if wide:
                args = [x.astype("float32") if floats(x) and isinstance(x, paddle.Tensor) else x for x in args]
            with paddle.amp.auto_cast(enable=False) if wide else contextlib.nullcontext():
                result = call(layer, *args, **kwargs)
        finally:
            depth.pop()
        if len(broken) < 3 and not all(map(is_finite, floats(result))) and all(map(is_finite, floats([args, kwargs]))):
            broken.append((names[layer], [str(x.dtype) for x in floats(result)]))
        return result

    nn.Layer.__call__ = __call__
    sys.argv, printed = [script, *options], io.StringIO()
    casting = paddle.amp.auto_cast(dtype=dtype, level="O1") if dtype else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), casting:
        runpy.run_path(script, run_name="__main__")
    losses = json.loads(printed.getvalue().splitlines()[-1])
    print(f"   {dtype or 'float32'} {' '.join(kept)}:", " ".join(f"{loss:.4g}" for loss in losses), broken, flush=True)


def main():
    dtype = sys.argv[1]
    for named in sys.argv[2:]:
        script, _, kept = named.partition("@")
        print("==", os.path.basename(script), dtype, flush=True)
        for options in options_of(script):
            for how in [(None, []), (dtype, []), *([(dtype, kept.split(","))] if kept else [])]:
                if os.fork() == 0:
                    run(script, options, *how)
                    os._exit(0)
                os.wait()


if __name__ == "__main__":
    main()
