"""Prints, for operators of a static graph on the CPU, the dtype of the result: plain, denied and allowed.

The program is built, never run: building is where Paddle casts.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import paddle  # noqa: E402
import paddle.nn.functional as F  # noqa: E402, N812

import ampx  # noqa: E402


def weight(*shape):
    return paddle.static.create_parameter(list(shape), "float32")


OPERATORS = {
    "matmul": (paddle.matmul, lambda x: paddle.matmul(x, weight(8, 8))),
    "conv2d": (F.conv2d, lambda x: F.conv2d(x, weight(3, 8, 1, 1))),
    "multiply": (paddle.multiply, lambda x: paddle.multiply(x, x)),
    "add": (paddle.add, lambda x: paddle.add(x, x)),
    "tanh": (paddle.tanh, paddle.tanh),
    "max": (paddle.max, paddle.max),
    "exp": (paddle.exp, paddle.exp),
    "mean": (paddle.mean, paddle.mean),
    "sum": (paddle.sum, paddle.sum),
    "softmax": (F.softmax, F.softmax),
    "layer_norm": (F.layer_norm, lambda x: F.layer_norm(x, 8)),
}


def dtype_of(compute, **lists):
    program = paddle.static.Program()
    amp = ampx.init("paddle", dtype="bfloat16", device="cpu", **lists)
    with paddle.static.program_guard(program, paddle.static.Program()):
        x = paddle.static.data("x", [4, 8, 8, 8], "float32")
        low = paddle.matmul(x, weight(8, 8))
        found = str(compute(low).dtype).removeprefix("paddle.")
    amp.shutdown()
    return found


def main():
    paddle.enable_static()
    found = {}
    for name, (function, compute) in OPERATORS.items():
        row = [dtype_of(compute)]
        row += [dtype_of(compute, **{lists: [entry]}) for lists in ("deny", "allow") for entry in (function, name)]
        row.append(dtype_of(compute, deny=["*"]))
        found[name] = row
    found["former name"] = [dtype_of(OPERATORS["matmul"][1], deny=["matmul_v2"])]
    found["both"] = [dtype_of(paddle.tanh, deny=["*"], allow=["tanh"])]
    print("JSON" + json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
