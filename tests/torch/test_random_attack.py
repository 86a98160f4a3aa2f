"""Random programs with parameters of any kind: training through ampx is plain PyTorch's without a loss scale.

Every bit is compared: loss scales are powers of two, and lose no digit. A step that overflows is
one that plain PyTorch leaves out.
"""

import copy
import math
import os
import random

import pytest
import torch
from torch import nn

import ampx

ALL = bool(os.environ.get("AMPX_TEST_ALL"))
STEPS = 2000 if ALL else 120
EACH = 5  # steps of a program
KINDS = ("float32", "float64", "complex64", "no elements", "frozen", "tied", "sparse")


class Model(nn.Module):
    """Parameters of some kinds, and a loss that is a sum of their squares."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        parts = {}
        for kind in kinds:
            dtype = {"float64": torch.float64, "complex64": torch.complex64}.get(kind, torch.float32)
            parts[kind] = nn.Parameter(torch.randn(0 if kind == "no elements" else 3, dtype=dtype))
        parts.pop("sparse", None)
        if "frozen" in parts:
            parts["frozen"].requires_grad_(False)
        self.parts = nn.ParameterDict(parts)
        self.rows = nn.Embedding(4, 2, sparse=True) if "sparse" in kinds else None

    def forward(self, index, factor):
        total = torch.zeros(())
        for kind, own in self.parts.items():
            values = torch.cat([own, 2 * own]) if kind == "tied" else own
            total = total + (values.abs() if values.is_complex() else values).square().sum().float()
        if self.rows is not None:
            total = total + self.rows(index).square().sum()
        return total * factor


def optimizer_of(drawn, model, kinds):
    parameters = list(model.parameters())
    if "sparse" in kinds:
        return torch.optim.SGD(parameters, lr=0.125)
    if drawn.random() < 0.5:
        return torch.optim.AdamW(parameters, lr=0.01, amsgrad=drawn.random() < 0.3)
    return torch.optim.SGD(parameters, lr=0.125, momentum=drawn.choice([0.0, 0.5]))


def program(seed):
    """Train with and without ampx by the choices of a seed, and compare after every step."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    kinds = drawn.sample(KINDS, drawn.randint(1, 4))
    if kinds == ["frozen"]:
        kinds = ["frozen", "float32"]
    model = Model(kinds)
    twin = copy.deepcopy(model)
    state = drawn.getstate()
    raw = optimizer_of(drawn, model, kinds)
    drawn.setstate(state)
    plain = optimizer_of(drawn, twin, kinds)
    max_norm = drawn.choice([None, 0.5, 4.0]) if not {"complex64", "sparse"} & set(kinds) else None
    opt = ampx.wrap_optimizer(raw, loss_scale=drawn.choice(["dynamic", 1024.0, 1.0]), max_grad_norm=max_norm)
    set_to_none, accumulates = drawn.random() < 0.5, drawn.randint(1, 3)

    def body(index, factor):
        with ampx.scale_loss(model(index, factor), opt) as scaled:
            scaled.backward()

    def whole(index, factor):
        for _ in range(accumulates):
            body(index, factor)
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)

    compiles = drawn.random() < 0.05 and ALL  # a minute each
    if compiles:
        whole = torch.compile(whole, backend=drawn.choice(["eager", "aot_eager"]))
    for _ in range(EACH):
        index, factor = torch.tensor([drawn.randrange(4), drawn.randrange(4)]), drawn.choice([0.25, 0.5, 1.0, 2.0])
        overflows = not compiles and drawn.random() < 0.15 and kinds != ["no elements"]
        used = math.inf if overflows else factor
        if compiles:
            whole(index, used)
        else:
            for _ in range(accumulates):
                body(index, used)
            if drawn.random() < 0.3:
                ampx.unscale(opt)
            opt.step()
            opt.zero_grad(set_to_none=set_to_none)
        if not overflows:
            for _ in range(accumulates):
                twin(index, factor).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
            plain.step()
        plain.zero_grad(set_to_none=set_to_none)
        trained = {*kinds} - {"frozen", "no elements"}
        assert not trained or opt.last_step.applied is not overflows, (seed, kinds)
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(own, other), (seed, kinds)


@pytest.mark.filterwarnings("ignore")  # the compiler's, of what it leaves to Python
@pytest.mark.parametrize("part", range(4))
def test_training_of_any_parameters_is_that_of_plain_torch(part):
    ampx.init("torch", dtype="float16", level="O0", device="cpu")
    for seed in range(part, STEPS // EACH, 4):
        program(seed)
