"""A forward program in float16, as ampx casts it, built by a Paddle that has no kernels for it.

A build of Paddle for CPUs shows no more: it adds no backward to such a program, and runs none.
"""

import paddle
import pytest

import ampx
from ampx_paddle.graph_rewrite import cast_program

functional = paddle.nn.functional


@pytest.fixture
def program():
    """A classifier with a convolution, two products and what is sensitive; it is built, and nothing is cast."""
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()), paddle.utils.unique_name.guard():
        images = paddle.static.data("images", [8, 1, 4, 4])
        hidden = paddle.nn.Conv2D(1, 2, 3)(images).flatten(1)
        hidden = paddle.nn.LayerNorm(16)(functional.relu(paddle.nn.Linear(8, 16)(hidden)))
        labels = paddle.static.data("labels", [8, 1], "int64")
        functional.cross_entropy(paddle.nn.Linear(16, 4)(hidden), labels)
        paddle.mean(paddle.exp(hidden))
    return main


def computed_in(program, name):
    """Return what dtypes the operators of a name read and return, but for integers."""
    operations = [op for op in program.global_block().ops if op.name() == f"pd_op.{name}"]
    values = [value for op in operations for value in (*op.operands_source(), op.results()[0])]
    return {str(value.dtype).rpartition(".")[2].lower() for value in values} - {"int64"}


LOW, WIDE = ("conv2d", "matmul"), ("layer_norm", "exp", "mean", "cross_entropy_with_softmax")


def check(program):
    """Raise where a product is not computed in float16, or a sensitive operator not in float32."""
    for name in LOW:
        assert computed_in(program, name) == {"float16"}, name
    for name in WIDE:
        assert computed_in(program, name) == {"float32"}, name


def test_the_forward_program_multiplies_in_float16_and_nothing_else_does(program):
    assert cast_program(program, "float16") == 3
    check(program)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (None, "conv2d"),
        ({"deny": ["matmul_v2"]}, "matmul"),
        ({"deny": ["matmul"]}, "matmul"),
        ({"allow": ["exp"]}, "exp"),
    ],
    ids=["nothing is cast", "products are not cast", "by their name of today", "an exponential is cast"],
)
def test_a_planted_fault_is_noticed(program, options, word):
    if options is not None:
        cast_program(program, "float16", **options)
    with pytest.raises(AssertionError, match=word):
        check(program)


def test_a_name_of_no_operator_is_refused(program):
    with pytest.raises(ampx.UnsupportedOpError, match="matmull"):
        cast_program(program, "float16", deny=["matmull"])
