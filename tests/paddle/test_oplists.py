"""Op lists: what `allow` and `deny` name is computed in the dtype they say.

Eager Paddle casts nothing on a CPU; static graphs do, by the same lists, and show each operator's dtype when they are
built.
"""

import paddle
import pytest
from paddle.nn import functional

import ampx
from ampx.backend import CastPlan
from ampx_paddle import casting

LOW, WIDE = paddle.bfloat16, paddle.float32


def weight(*shape):
    return paddle.static.create_parameter(list(shape), "float32")


OPERATORS = {
    "matmul": (paddle.matmul, lambda x: paddle.matmul(x, weight(8, 8))),
    "conv2d": (functional.conv2d, lambda x: functional.conv2d(x, weight(3, 8, 1, 1))),
    "multiply": (paddle.multiply, lambda x: paddle.multiply(x, x)),
    "add": (paddle.add, lambda x: paddle.add(x, x)),
    "tanh": (paddle.tanh, paddle.tanh),
    "max": (paddle.max, paddle.max),
    "exp": (paddle.exp, paddle.exp),
    "mean": (paddle.mean, paddle.mean),
    "sum": (paddle.sum, paddle.sum),
    "softmax": (functional.softmax, functional.softmax),
    "layer_norm": (functional.layer_norm, lambda x: functional.layer_norm(x, 8)),
}
# As it is; denied and allowed, as a function and by name; and with everything denied, which is Paddle's level OD.
PRODUCT = [LOW, WIDE, WIDE, LOW, LOW, LOW]
FOLLOWS = [LOW, WIDE, WIDE, LOW, LOW, WIDE]
NEEDS_RANGE = [WIDE, WIDE, WIDE, LOW, LOW, WIDE]


def dtype_of(name, **lists):
    """Return the dtype of an operator's result; its input is low."""
    paddle.enable_static()
    with (
        ampx.init("paddle", dtype="bfloat16", device="cpu", **lists),
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
    ):
        low = paddle.matmul(paddle.static.data("x", [4, 8, 8, 8], "float32"), weight(8, 8))
        return OPERATORS[name][1](low).dtype


@pytest.mark.bfloat16
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, PRODUCT) for name in ("matmul", "conv2d")),
        *((name, FOLLOWS) for name in ("multiply", "add", "tanh", "max")),
        *((name, NEEDS_RANGE) for name in ("exp", "mean", "sum", "softmax", "layer_norm")),
    ],
)
def test_an_operators_dtype_is_as_paddles_lists_and_the_sessions_say(name, expected):
    entries = [(lists, entry) for lists in ("deny", "allow") for entry in (OPERATORS[name][0], name)]
    dtypes = [dtype_of(name, **{lists: [entry]}) for lists, entry in entries]
    assert [dtype_of(name), *dtypes, dtype_of(name, deny=["*"])] == expected


@pytest.mark.bfloat16
def test_former_names_of_operators_are_taken_too():
    assert dtype_of("matmul", deny=["matmul_v2"]) == WIDE


def test_a_name_that_is_almost_an_operators_is_answered_with_it():
    with pytest.raises(ampx.UnsupportedOpError, match=r"'sofmax' is no operator of paddle.* Did you mean 'softmax'\?$"):
        casting.check_plan(CastPlan("cpu", "bfloat16", "O1", (), ("sofmax",)))


@pytest.mark.bfloat16
def test_allow_makes_an_exception_from_deny_everything():
    assert dtype_of("tanh", deny=["*"], allow=["tanh"]) == LOW


def test_a_name_that_native_auto_cast_takes_and_ignores(native):
    """Paddle compares the names that operators had in Paddle 1; present ones change nothing, without a word."""
    code, out, err = native(
        """
paddle.enable_static()
for name in ("matmul", "matmul_v2"):
    with paddle.amp.auto_cast(dtype="bfloat16", custom_black_list={name}):
        print("SEEN", paddle.matmul(paddle.ones([2, 2]), paddle.ones([2, 2])).dtype)
"""
    )
    assert code == 0, err[-2000:]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("SEEN")] == [
        "paddle.bfloat16",
        "paddle.float32",
    ]


def test_everything_else_cannot_be_denied_where_parameters_are_low():
    with pytest.raises(ampx.UnsupportedOpError, match="level='O2'"):
        casting.check_plan(CastPlan("gpu", "float16", "O2", (), ("*",)))
    with pytest.raises(ampx.UnsupportedOpError, match="no operator"):
        casting.check_plan(CastPlan("gpu", "float16", "O1", ("*",), ()))


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="a CUDA build has an operator for linear layers")
def test_linear_layers_have_no_operator_of_their_own_here():
    for entry in ("linear", paddle.nn.functional.linear):
        with pytest.raises(ampx.UnsupportedOpError, match="Pass 'matmul'"):
            casting.check_plan(CastPlan("cpu", "bfloat16", "O1", (), (entry,)))
