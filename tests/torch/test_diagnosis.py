"""Small models with one planted fault each, and clean ones: `diagnose` names place and kind, and accuses nobody."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ampx.numerics.diagnose import diagnose
from planted_torch import CLEAN, FAULTS, Lambda, linear


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


class Branches(nn.Module):
    """The digits that `lossy` loses are missed in the head; `beside` runs in between and is right."""

    def __init__(self):
        super().__init__()
        self.first, self.lossy = linear(16, 1.0), Lambda(lambda x: (x + 4000) - 4000)
        self.beside, self.norm, self.head = Lambda(lambda x: x * 3.0), nn.LayerNorm(16), linear(16, 1.0)

    def forward(self, x):
        difference = self.lossy(self.first(x))
        return self.head(self.norm(difference)), self.beside(x)


def test_the_values_on_the_way_to_the_place_are_shown_back_to_one_that_agrees_with_float32():
    """float16 tells numbers around 4000 apart that differ by 2 or more: of numbers of about 1 nothing is left."""
    torch.manual_seed(0)
    model, batch = Branches(), torch.randn(8, 16)
    with torch.no_grad():
        exact = {"first": model.first(batch)}
        exact["lossy"] = (exact["first"] + 4000) - 4000
        low = (exact["first"].half() + 4000) - 4000
    diagnosis = diagnose(lambda m: m(batch)[0].float().square().mean(), model, dtype="float16", device="cpu")
    links = {link.place.module: link for link in diagnosis.chain if not link.place.operation or link.float32}
    assert diagnosis.first_nonfinite is not None
    assert "beside" not in links
    assert next(iter(links)) in ("first", "lossy")
    assert diagnosis.chain[0].error < 0.01
    wrong = links["lossy"]
    assert wrong.place.value.largest == pytest.approx(float(low.abs().max()))
    assert wrong.float32.largest == pytest.approx(float(exact["lossy"].abs().max()), rel=1e-3)
    off = float((low.float() - exact["lossy"]).norm() / exact["lossy"].norm())
    assert wrong.error == pytest.approx(off, rel=0.05)
