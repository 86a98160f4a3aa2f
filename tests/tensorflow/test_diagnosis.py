"""Models with one planted fault each, which `ampx.diagnose` names, and models without, in which it names nobody."""

import pytest

import ampx
from planted_tensorflow import CLEAN, FAULTS, X, loss_of
from products import first_of_each


@pytest.mark.parametrize("fault", first_of_each(FAULTS, lambda name: FAULTS[name][3:5]))
def test_a_planted_fault_is_named_with_its_kind_and_its_place(fault):
    make, inputs, place, kind, direction = FAULTS[fault]
    diagnosis = ampx.diagnose(loss_of(inputs), make(), dtype="float16", framework="tensorflow")
    assert diagnosis.kind == kind, str(diagnosis)
    if place is not None:
        assert (diagnosis.first_nonfinite.module, diagnosis.first_nonfinite.direction) == (place, direction)


@pytest.mark.parametrize("name", first_of_each(CLEAN))
def test_nobody_is_accused_in_a_model_without_a_fault(name):
    diagnosis = ampx.diagnose(loss_of(X), CLEAN[name](), dtype="float16", framework="tensorflow")
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)
