"""`ampx.import_state` on tensors that have no number to read."""

import pytest
import torch

import ampx

SAVED = torch.amp.GradScaler("cpu").state_dict()
TENSORS = {
    "meta": lambda: torch.ones((), device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "empty": lambda: torch.ones(0),
    "several": lambda: torch.ones(2),
    "complex": lambda: torch.ones((), dtype=torch.complex64),
    "nan": lambda: torch.tensor(float("nan")),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("field", ["scale", "growth_factor", "growth_interval", "_growth_tracker"])
def test_a_tensor_without_a_number_is_an_invalid_state(kind, field):
    with pytest.raises(ampx.InvalidStateError):
        ampx.import_state({**SAVED, field: TENSORS[kind]()})


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_in_place_of_a_schema_or_of_a_switch_raises_a_documented_error(kind):
    with pytest.raises(ampx.UnknownSchemaError):
        ampx.import_state({"schema": TENSORS[kind]()})
    with pytest.raises(ampx.InvalidStateError):
        ampx.import_state({"cur_scale": 8.0, "dynamic": TENSORS[kind]()})
    with pytest.raises(ampx.UnknownSchemaError):
        ampx.import_state(TENSORS[kind]())
