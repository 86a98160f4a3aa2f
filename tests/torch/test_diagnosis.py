"""Small models with one planted fault each, and clean ones: `diagnose` names place and kind, and accuses nobody."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ampx.numerics.diagnose import diagnose
from planted_torch import CLEAN, FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_place_and_kind(name):
    make, kind, direction, module = FAULTS[name]
    model, step = make()
    diagnosis = diagnose(step, model, dtype="float16", device="cpu")
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place and (place.direction, place.module)) == (kind, (direction, module)), str(diagnosis)
    assert diagnosis.advice


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_is_accused_of_nothing(name):
    model, step = CLEAN[name]()
    diagnosis = diagnose(step, model, dtype="float16", device="cpu")
    assert (diagnosis.kind, diagnosis.first_nonfinite) == ("healthy", None), str(diagnosis)


class Attends(nn.Module):
    """A convolution, a normalization and attention; an offset takes digits from what is normalized."""

    def __init__(self, offset):
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 16)
        nn.init.constant_(self.convolution.bias, offset)

    def forward(self, x):
        x = self.norm(self.convolution(x)).flatten(2).transpose(1, 2)
        return self.head(F.softmax(x @ x.transpose(1, 2), -1) @ x).mean(1)


@pytest.mark.parametrize(("offset", "expected"), [(0.0, ()), (100.0, ("norm",))])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_normalization_is_accused_where_it_is_off_and_a_softmax_is_none(dtype, offset, expected):
    model, inputs = Attends(offset), torch.randn(4, 16, 6, 6)
    targets = torch.arange(4)
    diagnosis = diagnose(lambda m: F.cross_entropy(m(inputs), targets), model, dtype=dtype)
    risks = {risk.kind: risk.where for risk in diagnosis.risks}
    assert risks.get("normalization", ()) == expected
