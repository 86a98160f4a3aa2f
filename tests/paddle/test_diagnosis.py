"""`ampx.diagnose` names planted faults by place and kind, and accuses nobody of clean models."""

import paddle
import pytest

import ampx
from planted_paddle import CLEAN, FAULTS
from products import first_of_each

GPU = bool(paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count())
pytestmark = [
    pytest.mark.filterwarnings("ignore:When training, we now always track"),
    pytest.mark.filterwarnings("ignore:Accumulating with FP16"),
]


# On the CPU what layers take and return is rounded, and not the operations inside.
ON_CPU = {"a sum": ("overflow", "forward", "1"), "backward": ("overflow", "backward", "1")}


def named(name, device):
    """Return kind, direction and module that are named, and the text."""
    make = FAULTS[name][0]
    model, step = make()
    diagnosis = ampx.diagnose(step, model, framework="paddle", dtype="float16", device=device)
    place = diagnosis.first_nonfinite
    return (diagnosis.kind, *((place.direction, place.module) if place else ())), str(diagnosis)


@pytest.mark.parametrize("name", first_of_each(FAULTS, lambda name: FAULTS[name][1:3]))
def test_a_planted_fault_is_named(name):
    actual, text = named(name, "cpu")
    assert actual == ON_CPU.get(name, FAULTS[name][1:]), text


@pytest.fixture
def gpu():
    before = paddle.get_device()
    paddle.set_device("gpu")
    yield
    paddle.set_device(before)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no GPU for paddle")
@pytest.mark.parametrize("name", first_of_each(FAULTS, lambda name: FAULTS[name][1:3]))
def test_a_planted_fault_is_named_on_a_gpu(name, gpu):
    actual, text = named(name, "gpu")
    assert actual == FAULTS[name][1:], text


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no GPU for paddle")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cpu_simulates_where_paddle_was_told_to_compute_there_and_is_refused_elsewhere(gpu, dtype):
    model, step = FAULTS["a middle layer"][0]()
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"computes on 'gpu:0' now: paddle\.set_device\('cpu'\)"):
        ampx.diagnose(step, model, framework="paddle", dtype=dtype, device="cpu")
    paddle.set_device("cpu")
    model, step = FAULTS["a middle layer"][0]()
    expected = {"float16": "overflow", "bfloat16": "healthy"}
    assert ampx.diagnose(step, model, framework="paddle", dtype=dtype, device="cpu").kind == expected[dtype]


def nobody_is_accused(name, device):
    paddle.seed(0)
    model, step = CLEAN[name]()
    diagnosis = ampx.diagnose(step, model, framework="paddle", dtype="float16", device=device)
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)


@pytest.mark.parametrize("name", first_of_each(CLEAN))
def test_a_clean_model_is_not_accused(name):
    nobody_is_accused(name, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no GPU for paddle")
@pytest.mark.parametrize("name", first_of_each([*CLEAN][::-1]))
def test_a_clean_model_is_not_accused_on_a_gpu(name, gpu):
    nobody_is_accused(name, "gpu")
