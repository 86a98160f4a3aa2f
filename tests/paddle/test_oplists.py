"""Op lists: what `allow` and `deny` name is computed in the dtype they say.

Eager Paddle casts nothing on a CPU; static graphs do, by the same lists, and show each operator's dtype.
"""

import json
import pathlib
import subprocess
import sys

import paddle
import pytest

import ampx
from ampx.backend import CastPlan
from ampx_paddle import casting

LOW, WIDE = "bfloat16", "float32"
WORKER = pathlib.Path(__file__).with_name("oplist_worker.py")


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("JSON", 1)[1])


@pytest.mark.bfloat16
@pytest.mark.parametrize("name", ["matmul", "conv2d"])
def test_products_are_low_unless_denied(found, name):
    assert found[name] == [LOW, WIDE, WIDE, LOW, LOW, LOW]


@pytest.mark.bfloat16
@pytest.mark.parametrize("name", ["multiply", "add", "tanh", "max"])
def test_operators_of_no_list_follow_their_inputs_unless_denied(found, name):
    """Denied one by one, or all of them with "*", which is Paddle's level OD."""
    assert found[name] == [LOW, WIDE, WIDE, LOW, LOW, WIDE]


@pytest.mark.bfloat16
@pytest.mark.parametrize("name", ["exp", "mean", "sum", "softmax", "layer_norm"])
def test_operators_that_need_the_range_are_wide_unless_allowed(found, name):
    assert found[name] == [WIDE, WIDE, WIDE, LOW, LOW, WIDE]


@pytest.mark.bfloat16
def test_former_names_of_operators_are_taken_too(found):
    assert found["former name"] == [WIDE]


@pytest.mark.bfloat16
def test_allow_makes_an_exception_from_deny_everything(found):
    assert found["both"] == [LOW]


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
