"""Small models with one planted fault each, and clean ones: `diagnose` names place and kind, and accuses nobody."""

import pytest

from ampx.numerics.diagnose import diagnose

pytest.importorskip("flax", reason="flax is not installed")

from planted_jax import CLEAN, FAULTS
from products import first_of_each


@pytest.mark.parametrize("name", first_of_each(FAULTS, lambda name: FAULTS[name][2][:2]))
def test_a_planted_fault_is_named_by_place_and_kind(name):
    make, options, expected = FAULTS[name]
    model, step = make()
    diagnosis = diagnose(step, model, dtype="float16", framework="jax", device="cpu", **options)
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place and place.direction, place and place.module) == expected, str(diagnosis)
    assert diagnosis.advice


@pytest.mark.parametrize("name", first_of_each(CLEAN))
def test_a_clean_model_is_accused_of_nothing(name):
    model, step = CLEAN[name]()
    diagnosis = diagnose(step, model, dtype="float16", framework="jax", device="cpu")
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)
