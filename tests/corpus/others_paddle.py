"""Paddle's checker of tensors on a script in Paddle's own mixed precision: see `others.py`.

The simulated GPU is that of `simulated/sitecustomize.py`, which `score.py` puts on the path.
"""

import sys

import paddle
from others import answer, lines_in, said_by
from paddle.amp import debugging


def main():
    _, dtype, script, *options = sys.argv[1:]
    mode = debugging.DebugMode.CHECK_NAN_INF_AND_ABORT
    debugging.enable_tensor_checker(debugging.TensorCheckerConfig(enable=True, debug_mode=mode))
    with paddle.amp.auto_cast(dtype=dtype, level="O1"):
        text = said_by(script, options)
    lines = lines_in(script, text)
    answer(script, text, blamed="Traceback" in text, line=lines[-1] if lines else None)


if __name__ == "__main__":
    main()
