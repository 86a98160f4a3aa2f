import copy
import dataclasses
import math
from collections import namedtuple

import pytest
import torch
from torch import nn

import ampx
from ampx import debug
from ampx_torch.debug import name_parameters


def backward(loss, opt):
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()


def overflow_in(parameter, *values):
    """Put values that are not finite in a parameter's gradient, then step."""
    parameter.grad.view(-1)[: len(values)] = torch.tensor(values)


def two_layers():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("device_scale", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_nonfinite_parameters_names_exactly_the_culprits_after_a_skipped_step(device_scale, max_grad_norm):
    ampx.init("torch", dtype="float32", loss_scale="dynamic")
    model = two_layers()
    raw = torch.optim.Adam(model.parameters(), fused=True)
    opt = ampx.wrap_optimizer(raw, device_scale=device_scale, max_grad_norm=max_grad_norm)
    backward(model(torch.ones(1, 3)).sum(), opt)
    overflow_in(model[0].weight, INF, -INF, NAN)
    overflow_in(model[1].weight, NAN)
    opt.step()
    assert opt.last_step.applied is False
    assert debug.nonfinite_parameters(opt, model) == [
        debug.NonFiniteParameter("0.weight", 3, 6),
        debug.NonFiniteParameter("1.weight", 1, 2),
    ]


def test_nonfinite_parameters_is_empty_after_an_applied_step_and_before_any_gradient():
    ampx.init("torch", dtype="float32", loss_scale="dynamic")
    model = two_layers()
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert debug.nonfinite_parameters(opt, model) == []
    backward(model(torch.ones(1, 3)).sum(), opt)
    opt.step()
    assert opt.last_step.applied is True
    assert debug.nonfinite_parameters(opt, model) == []


@pytest.mark.parametrize(
    ("made_from", "name"),
    [
        (lambda model: list(model.named_parameters()), "1.weight"),
        (lambda model: model.parameters(), "1.weight"),
        (lambda model: [{"params": [p]} for p in model.parameters()], "1.weight"),
    ],
    ids=["named parameters", "living modules", "living modules, groups"],
)
def test_without_a_model_names_come_from_the_optimizer_or_the_modules_that_live(made_from, name):
    ampx.init("torch", dtype="float32", loss_scale="dynamic")
    model = two_layers()
    opt = ampx.wrap_optimizer(torch.optim.SGD(made_from(model), lr=0.1))
    backward(model(torch.ones(1, 3)).sum(), opt)
    overflow_in(model[1].weight, INF)
    opt.step()
    assert [entry.name for entry in debug.nonfinite_parameters(opt)] == [name]
    assert [entry.name for entry in debug.nonfinite_parameters(opt, model)] == ["1.weight"]


def names_of(*parameters):
    return [name for name, _ in name_parameters([{"params": list(parameters)}], None)]


def test_parameters_of_two_models_are_told_apart_by_their_class_and_else_by_their_position():
    class Critic(nn.Sequential):
        pass

    actor, critic, twin = two_layers(), Critic(nn.Linear(3, 2)), Critic(nn.Linear(3, 2))
    assert names_of(actor[0].weight, nn.Parameter(torch.ones(1))) == ["0.weight", "param_groups[0]['params'][1] (1,)"]
    assert names_of(actor[0].bias, critic[0].bias) == ["Sequential.0.bias", "Critic.0.bias"]
    assert names_of(critic[0].bias, twin[0].bias) == [f"param_groups[0]['params'][{n}] (2,)" for n in (0, 1)]
    assert names_of(nn.DataParallel(actor).module[1].weight) == ["1.weight"]


def test_a_tied_weight_has_the_name_it_has_in_named_parameters():
    ampx.init("torch", dtype="float32", loss_scale="dynamic")
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model(torch.ones(1, 2)).sum(), opt)
    overflow_in(model[0].weight, INF)
    opt.step()
    assert [entry.name for entry in debug.nonfinite_parameters(opt, model)] == ["0.weight"]


def test_sparse_gradients_are_counted_by_their_stored_values():
    ampx.init("torch", dtype="float32", loss_scale="dynamic")
    model = nn.Embedding(10, 2, sparse=True)
    opt = ampx.wrap_optimizer(torch.optim.SparseAdam(model.parameters()))
    backward((model(torch.tensor([1, 4])) * torch.tensor([[1.0, INF], [1.0, 1.0]])).sum().abs(), opt)
    opt.step()
    assert opt.last_step.applied is False
    assert debug.nonfinite_parameters(opt, model) == [debug.NonFiniteParameter("weight", 1, 20)]


def test_master_weights_carry_the_names_of_the_models_parameters():
    amp = ampx.init("torch", dtype="bfloat16", level="O2", loss_scale="dynamic")
    model, raw = amp.prepare(model := two_layers(), torch.optim.SGD(model.parameters(), lr=0.1))
    opt = ampx.wrap_optimizer(raw)
    backward(model(torch.ones(1, 3)).float().sum(), opt)
    overflow_in(model[1].weight, INF)
    opt.step()
    assert opt.last_step.applied is False
    assert [entry.name for entry in debug.nonfinite_parameters(opt, model)] == ["1.weight"]


def test_a_raw_optimizer_is_refused():
    ampx.init("torch", dtype="float32")
    with pytest.raises(ampx.NotWrappedError, match="SGD"):
        debug.nonfinite_parameters(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


# -- trace_overflow ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Runs its parts in another order than it registers them, and returns a nested container."""

    def __init__(self, wrap):
        super().__init__()
        self.late = nn.Linear(2, 2, bias=False)
        self.early = nn.Linear(2, 2, bias=False)
        self.wrap = wrap
        nn.init.constant_(self.early.weight, 1.0)
        nn.init.constant_(self.late.weight, 1.0)

    def forward(self, *, x):
        return self.wrap(self.late(self.early(x)))


def test_the_first_in_order_of_execution_and_innermost_is_named():
    ampx.init("torch", dtype="float16")
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2))
    nn.init.constant_(model[1][0].weight, 300.0)  # 300 · (200 + 200) = 120000 > 65504
    with ampx.trace_overflow(model) as trace:
        model(torch.full((3, 2), 200.0))
    first = trace.first
    assert (first.module, first.kind, first.dtype) == ("1.0", "Linear", "float16")
    assert (first.value.nonfinite, first.value.elements) == (6, 6)
    assert (first.inputs.nonfinite, first.inputs.largest) == (0, 200.0)
    assert "1.0 (Linear): 6 of 6 outputs in float16" in str(trace)


def test_execution_order_counts_not_registration_order_and_keyword_inputs_are_seen():
    ampx.init("torch", dtype="float16")
    model = Block(lambda y: y)
    with ampx.trace_overflow(model) as trace:
        model(x=torch.full((1, 2), 40000.0))
    assert (trace.first.module, trace.first.inputs.nonfinite) == ("early", 0)
    with ampx.trace_overflow(model) as trace:
        model(x=torch.tensor([[INF, 3.0]]))
    assert (trace.first.module, trace.first.inputs.nonfinite, trace.first.inputs.largest) == ("early", 1, 3.0)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    logits: object
    other: object = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: [{"deep": (None, "text", y)}],
        lambda y: Pair(torch.ones(1), y),
        lambda y: Output(logits=[y]),
        lambda y: y.to_sparse(),
        lambda y: torch.complex(y, y),
    ],
    ids=["list of dict of tuple", "named tuple", "dataclass", "sparse", "complex"],
)
def test_outputs_in_any_container_are_looked_at(wrap):
    ampx.init("torch", dtype="float32")
    # Every inner module is finite; the model's own output is not.
    model = Block(lambda y: wrap(y * INF))
    with ampx.trace_overflow(model) as trace:
        model(x=torch.ones(1, 2))
    assert (trace.first.module, trace.first.kind, trace.first.inputs.nonfinite) == ("", "Block", 0)
    assert str(trace).startswith("(the model) (Block)")


def test_a_module_that_overwrites_its_input_is_not_excused():
    class Explode(nn.Module):
        def forward(self, x):
            return x.mul_(INF)

    ampx.init("torch", dtype="float32")
    model = nn.Sequential(nn.Identity(), Explode())
    with torch.no_grad(), ampx.trace_overflow(model) as trace:
        model(torch.full((2,), 2.0))
    assert (trace.first.module, trace.first.inputs.nonfinite, trace.first.inputs.largest) == ("1", 0, 2.0)


def hooks_of(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_hooks_are_gone_afterwards_whatever_happens():
    class Broken(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    ampx.init("torch", dtype="float32")
    model = nn.Sequential(nn.Linear(2, 2), Broken())
    before = hooks_of(model)
    with pytest.raises(ZeroDivisionError), ampx.trace_overflow(model) as trace:
        model(torch.ones(1, 2))
    assert hooks_of(model) == before
    assert trace.first is None
    assert str(trace) == "no module's output overflowed"
    copy.deepcopy(model)  # nothing uncopyable is left behind


def test_a_forward_that_raised_does_not_confuse_the_next():
    class Fussy(nn.Module):
        def forward(self, x):
            if x.sum() > 10:
                raise ZeroDivisionError
            return x * INF

    ampx.init("torch", dtype="float32")
    model = nn.Sequential(Fussy())
    with ampx.trace_overflow(model) as trace:
        with pytest.raises(ZeroDivisionError):
            model(torch.full((1,), 77.0))
        model(torch.full((1,), 3.0))
    assert trace.first.inputs.largest == 3.0


def test_modules_inside_a_compiled_model_are_named():
    ampx.init("torch", dtype="float32")
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    nn.init.constant_(model[0].weight, 3e38)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2))
    with ampx.trace_overflow(compiled) as trace:
        compiled(torch.full((1, 2), 4.0))
    assert trace.first.module == "0"  # as `deny` takes it
