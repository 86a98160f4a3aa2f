"""`watch`, `force` and `replay`, with NumPy as the oracle."""

import copy
import copyreg
import dataclasses
import io
import os
import pickle
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampx
from ampx.backend import CastPlan, offer
from ampx.numerics.probe import Probe, Watching
from ampx.numerics.rounding import describe, round_to, sample
from ampx_torch.backend import TorchBackend

INF, NAN = float("inf"), float("nan")
PROBE = offer(TorchBackend(), Probe)


def seen(readings, direction="forward", operation=""):
    return [r for r in readings if r.direction == direction and r.operation == operation]


def numbers(dtype):
    """Numbers around the limits of every dtype that is watched, on either side of a tie, and what is not finite."""
    edges = [2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134, 448.0, 464.0, 480.0, 65504.0, 65520.0, 65536.0, 61440.0, 3e38]
    values = [0.0, -0.0, INF, -INF, NAN, 1.0, -2.5, *edges, *(np.nextafter(np.float32(e), 0.0) for e in edges)]
    tensor = torch.tensor([*values, *(-v for v in values)], dtype=torch.float32).to(dtype)
    return tensor, tensor.float().numpy()


# -- watch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("watched", ["float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2"])
def test_counts_are_those_of_numpy(dtype, watched):
    tensor, values = numbers(dtype)
    with PROBE.watch(model := nn.Sequential(nn.Identity()), Watching(watched)) as watch:
        model(tensor)
    inner, outer = watch.readings()
    assert (inner.module, outer.module, inner.dtype) == ("0", "", str(dtype).removeprefix("torch."))
    assert inner.value == outer.value == inner.inputs == describe(values, watched)


class Quantized(torch.Tensor):
    """Like the states of an optimizer with 8 bits: it says float32 and computes nothing."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a quantized tensor")


@pytest.mark.parametrize("unreadable", [torch.zeros(3, device="meta"), Quantized((3,))], ids=["meta", "quantized"])
def test_tensors_without_elements_to_read_are_left_out(unreadable):
    with PROBE.watch(model := nn.Identity(), Watching(operations=True)) as watch:
        model(unreadable)
        model(torch.ones(3))
    (reading,) = seen(watch.readings())
    assert reading.value == describe(np.ones(3, np.float32), "float16")


def test_samples_are_the_elements_at_the_multiples_that_numpy_takes():
    class Two(nn.Module):
        def forward(self, x):
            return x[:, ::2], {"rest": x.t()}

    values = torch.arange(70.0, requires_grad=True).reshape(7, 10) * 1.0
    with PROBE.watch(model := Two(), Watching(samples=9)) as watch:
        left, right = model(values)
        (left.sum() * 3 + (right["rest"] * 5).sum()).backward()
    (forward,), (backward,) = seen(watch.readings()), seen(watch.readings(), "backward")
    x = values.detach().numpy()
    expected = np.concatenate([x[:, ::2].reshape(-1), x.T.reshape(-1)])
    np.testing.assert_array_equal(forward.sample, sample(expected, 9))
    gradient = np.concatenate([np.full(35, 3.0), np.full(70, 5.0)])
    np.testing.assert_array_equal(backward.sample, sample(gradient, 9))
    assert backward.value == describe(gradient)


@dataclasses.dataclass
class Output:
    logits: object


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: [{"deep": (None, "text", y)}],
        lambda y: Output([y]),
        lambda y: y.to_sparse(),
        lambda y: torch.view_as_complex(y.reshape(-1, 2).contiguous()),
        lambda y: (y, y[:0]),
    ],
    ids=["containers", "dataclass", "sparse", "complex", "empty"],
)
def test_outputs_of_any_shape_are_read(wrap):
    class Wrapped(nn.Module):
        def forward(self, x):
            return wrap(x)

    values = torch.tensor([[1.0, -7.0], [2.0, 3.0]], requires_grad=True)
    with PROBE.watch(model := Wrapped(), Watching()) as watch:
        model(values * 1.0)
    (reading,) = watch.readings()
    assert reading.value == describe(values.detach().numpy())


def test_an_output_that_has_no_gradient_beside_one_that_has_is_left_out():
    class Moments(nn.Module):
        def forward(self, x):
            return torch.var_mean(x)  # two outputs of one operation, as those of a recurrent layer on a GPU

    with PROBE.watch(model := Moments(), Watching()) as watch:
        model(torch.tensor([1.0, 2.0, 6.0], requires_grad=True))[0].backward()
    (backward,) = seen(watch.readings(), "backward")
    assert (backward.value.elements, backward.value.largest) == (1, 1.0)


def test_a_module_without_an_output_and_one_of_integers_are_left_out():
    class Nothing(nn.Module):
        def forward(self, x):
            return None

    class Counts(nn.Module):
        def forward(self, x):
            return x.argmax()

    model = nn.ModuleDict({"nothing": Nothing(), "counts": Counts()})
    with PROBE.watch(model, Watching()) as watch:
        for module in model.values():
            module(torch.ones(3))
    assert watch.readings() == []


def test_modules_in_place_shared_and_called_again_are_told_apart_by_call():
    shared = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    reference = copy.deepcopy(model)
    x = torch.randn(3, 2)
    with PROBE.watch(model, Watching(modules=("1",))) as watch:
        model(x).sum().backward()
    reference(x).sum().backward()
    assert [(r.module, r.direction, r.call) for r in watch.readings()] == [
        ("1", "forward", 0),
        ("1", "forward", 1),
        ("1", "backward", 0),
        ("1", "backward", 1),
    ]
    last = describe(reference(x).detach().numpy())
    assert seen(watch.readings())[1].value == last
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed in backward", "reentrant"])
def test_with_checkpointing_every_module_is_read_once_in_each_direction(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    with PROBE.watch(model, Watching(operations=True)) as watch:
        model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    for direction in ("forward", "backward"):
        calls = [(r.module, r.call) for r in seen(watch.readings(), direction)]
        assert sorted(calls) == [("", 0), ("inner", 0), ("inner.0", 0), ("inner.1", 0)]
    assert [r.call for r in seen(watch.readings(), operation="addmm")] == [0]


def test_operations_are_read_with_module_and_line_forward_and_backward():
    class Middle(nn.Module):
        def forward(self, x):
            return torch.exp(x * 3.0)

    model = nn.Sequential(nn.Linear(2, 2), Middle())
    with PROBE.watch(model, Watching(operations=True)) as watch:
        model(torch.ones(4, 2)).sum().backward()
    (exp,) = seen(watch.readings(), operation="exp")
    assert (exp.module, exp.kind) == ("1", "Middle")
    file, line = exp.place.rsplit(":", 1)
    assert (file, int(line)) == (os.path.relpath(__file__), Middle.forward.__code__.co_firstlineno + 1)
    assert exp.inputs.elements == exp.value.elements == 8
    assert exp.value == seen(watch.readings())[1].value
    backward = [r for r in watch.readings() if r.direction == "backward" and r.operation]
    assert {(r.module, r.operation) for r in backward} >= {("1", "mul"), ("0", "mm")}
    assert {r.place for r in backward if r.module == "1"} == {exp.place}
    # the weight's gradient is the sum over the batch of outer products
    assert any(r.operation == "mm" and r.value.elements == 4 for r in backward)


def test_what_is_not_finite_first_is_where_it_came_from():
    class Logarithm(nn.Module):
        def forward(self, x):
            return torch.log(x - x)

    model = nn.Sequential(nn.Linear(2, 2), Logarithm(), nn.Linear(2, 2))
    with PROBE.watch(model, Watching(operations=True)) as watch:
        model(torch.ones(1, 2))
    first = next(r for r in watch.readings() if r.value.nonfinite)
    assert (first.module, first.operation, first.inputs.zeros, first.inputs.nonfinite) == ("1", "log", 2, 0)


def test_every_model_is_seen_where_none_is_named_and_the_second_with_its_class():
    first, second = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 1))
    with PROBE.watch(None, Watching()) as watch:
        nn.functional.mse_loss(second(first(torch.ones(1, 2))), torch.ones(1, 1)).backward()
        nn.MSELoss()(first(torch.ones(1, 2)), torch.ones(1, 2))
    names = [(r.module, r.call) for r in seen(watch.readings())]
    assert names == [
        *[("0", 0), ("1", 0), ("", 0), ("Sequential:0", 0), ("Sequential:", 0)],
        *[("0", 1), ("1", 1), ("", 1), ("MSELoss:", 0)],
    ]
    assert [r.module for r in seen(watch.readings(), "backward")] == ["Sequential:0", "Sequential:", "1", "", "0"]
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert not any(m._forward_hooks or m._forward_pre_hooks for model in (first, second) for m in model.modules())


@pytest.mark.parametrize("named", [True, False], ids=["named", "all"])
def test_modules_inside_a_compiled_model_have_their_own_names(named):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 2))
    with PROBE.watch(compiled if named else None, Watching()) as watch:
        compiled(torch.ones(1, 2))
    assert [r.module for r in watch.readings()] == ["0", "1", ""]


def test_it_changes_neither_values_nor_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
    results = []
    for watched in (nn.Linear(1, 1), model):
        torch.manual_seed(7)
        model.zero_grad()
        with PROBE.watch(watched, Watching(operations=True, samples=3, times=True)):
            loss = model(torch.ones(3, 4)).sum()
            loss.backward()
        results.append([loss.detach(), torch.rand(3), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_times_are_positive_and_those_of_a_container_hold_those_of_its_parts():
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    began = time.perf_counter()
    with PROBE.watch(model, Watching(times=True)) as watch:
        model(torch.ones(300, 300)).sum().backward()
    ended = time.perf_counter()
    first, second, whole = seen(watch.readings())
    assert first.seconds > 0
    assert second.seconds > 0
    assert ended - began >= whole.seconds >= first.seconds + second.seconds
    assert {r.seconds for r in seen(watch.readings(), "backward")} == {None}


class Kept(nn.Module):
    """Keep the handle of a hook of its own, as published models do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.handle = self.inner.register_forward_hook(double, with_kwargs=True)

    def forward(self, x):
        return self.inner(x)


def double(module, args, kwargs, output):
    return 2 * output


def saved_by_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"ampx" not in buffer.getvalue()
    buffer.seek(0)
    with torch.serialization.safe_globals([Kept, nn.Linear, double, torch.utils.hooks.RemovableHandle]):
        return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_by_torch],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_a_watched_model_has_the_hooks_of_its_own_and_no_others(copied):
    model, x = Kept(), torch.ones(1, 2)
    tables = [name for name in vars(model) if "forward" in name]
    expected = {name: dict(vars(model.inner)[name]) for name in tables}
    with PROBE.watch(model, Watching()) as watch, PROBE.force(model, {"inner": "float32"}):
        twin = copied(model)
        assert torch.equal(twin(x), model(x))
    assert len(watch.readings()) == 2  # of the model itself
    assert {name: dict(vars(twin.inner)[name]) for name in tables} == expected
    twin.handle.remove()
    assert torch.equal(2 * twin(x), model(x))
    assert OrderedDict not in copyreg.dispatch_table


def test_a_forward_that_raises_leaves_no_trace():
    class Broken(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(2, 2), Broken())
    with PROBE.force(model, {"": "bfloat16"}), PROBE.watch(model, Watching(operations=True)) as watch:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 2))
        assert not torch.is_autocast_enabled("cpu")
        model[0](torch.ones(1, 2))
    assert [(r.module, r.call) for r in seen(watch.readings())] == [("0", 0), ("0", 1)]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- force -------------------------------------------------------------------------------------------


class Probe(nn.Module):
    """Notes the dtype that a product computes in."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.dtype = None

    def forward(self, x, scale=None):
        for part in self.parts:
            x = part(x)
        product = x @ self.weight
        self.dtype = product.dtype
        return product


@pytest.mark.parametrize("session", [None, "bfloat16"], ids=["without a session", "in a session"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "all"])
def test_modules_compute_in_the_dtype_they_are_forced_into_and_inner_entries_hold(session, named):
    if session:
        ampx.init("torch", dtype=session)
    inner = Probe()
    middle = Probe(inner)
    model = Probe(middle, Probe())
    outside = torch.is_autocast_enabled("cpu")
    forced = {"parts.*": "float16", "parts.0": "float32", "parts.0.parts.0": "bfloat16"}
    with PROBE.force(model if named else None, forced):
        model(torch.ones(2, 2)).sum().backward()
    dtypes = [module.dtype for module in (inner, middle, model.parts[1], model)]
    own = torch.bfloat16 if session else torch.float32
    assert dtypes == [torch.bfloat16, torch.float32, torch.float16, own]
    assert torch.is_autocast_enabled("cpu") is outside
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_regions_nest_and_the_inner_one_holds():
    model = nn.Sequential(Probe(), Probe())
    with PROBE.force(model, {"*": "bfloat16"}):
        with PROBE.force(model, {"1": "float32"}):
            model(torch.ones(1, 2))
            assert (model[0].dtype, model[1].dtype) == (torch.bfloat16, torch.float32)
        model(torch.ones(1, 2))
        assert model[1].dtype == torch.bfloat16
    model(torch.ones(1, 2))
    assert model[1].dtype == torch.float32


def test_it_goes_before_a_rule_of_the_session():
    amp = ampx.init("torch", dtype="bfloat16", deny=["module:0"])
    model = amp.prepare(nn.Sequential(Probe(), Probe()))
    for pair in ({"0": "bfloat16", "1": "float32"}, {}):
        with PROBE.force(model, pair):
            model(torch.ones(1, 2))
        wanted = (torch.bfloat16, torch.float32) if pair else (torch.float32, torch.bfloat16)
        assert (model[0].dtype, model[1].dtype) == wanted


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.BatchNorm1d], ids=lambda kind: kind.__name__)
def test_low_precision_weights_are_widened_where_float32_is_forced_and_get_their_gradients(kind):
    model = (kind(3) if kind is nn.BatchNorm1d else kind(3, 3)).to(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    x = torch.randn(4, 3)

    def output(module):
        out = module(x)
        return out[0] if isinstance(out, tuple) else out

    with PROBE.force(model, {"": "float32"}):
        got = output(model)
        got.square().sum().backward()
    expected = output(reference)
    expected.square().sum().backward()
    assert torch.equal(got, expected)
    for own, wide in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.dtype == torch.bfloat16
        assert torch.equal(own.grad, wide.grad.to(torch.bfloat16))
    for own, wide in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(own, wide.to(own.dtype))


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_a_dtype_is_simulated_by_rounding_inputs_outputs_and_gradients_of_outputs(dtype):
    class Double(nn.Module):
        def forward(self, x):
            return {"y": (x * 2.0,)}

    tensor, values = numbers(torch.float32)
    tensor = tensor.requires_grad_()
    with PROBE.force(model := nn.Sequential(Double()), {"0": dtype}):
        (result,) = model(tensor)["y"]
    assert result.dtype == torch.float32
    expected = round_to(round_to(values, dtype) * np.float32(2), dtype)
    np.testing.assert_array_equal(result.detach().numpy(), expected)
    gradient = torch.linspace(-500, 500, len(values))
    result.backward(gradient)
    np.testing.assert_array_equal(tensor.grad.numpy(), round_to(gradient.numpy(), dtype) * 2)


def test_names_pass_through_wrappers_of_torch():
    model = nn.Sequential(Probe(), Probe())
    compiled = torch.compile(nn.Sequential(model), backend="eager")
    with PROBE.force(compiled, {"0.1": "bfloat16"}):
        compiled(torch.ones(1, 2))
    assert (model[0].dtype, model[1].dtype) == (torch.float32, torch.bfloat16)


# -- replay ------------------------------------------------------------------------------------------


def state_of(model):
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def test_a_replay_draws_the_same_mask_and_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    model[0].weight.grad = pending = torch.full((8, 8), 3.0)
    model[1].eval()
    model[1].train()
    x = torch.randn(16, 8)
    before, rng = state_of(model), torch.get_rng_state()
    masks = []

    def step(m):
        masks.append(m[2](torch.ones(100)))
        np.random.rand()
        return m(x).square().mean()

    with PROBE.watch(model, Watching(samples=8)) as watch:
        replays = [PROBE.replay(model, step, None) for _ in range(2)]
    assert torch.equal(*masks)
    assert replays[0].loss == replays[1].loss
    for name, gradient in replays[0].gradients.items():
        np.testing.assert_array_equal(gradient, replays[1].gradients[name])
    half = len(watch.readings()) // 2
    for left, right in zip(watch.readings()[:half], watch.readings()[half:], strict=True):
        assert (left.module, left.value) == (right.module, right.value)
        np.testing.assert_array_equal(left.sample, right.sample)
    assert all(map(torch.equal, before, state_of(model)))
    assert torch.equal(rng, torch.get_rng_state())
    assert model[0].weight.grad is pending
    assert torch.equal(pending, torch.full((8, 8), 3.0))
    assert model[3].weight.grad is None
    # the same by hand
    torch.set_rng_state(rng)
    loss = step(model)
    assert replays[0].loss == loss.item()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        np.testing.assert_array_equal(replays[0].gradients[name], gradient.numpy())


def test_a_step_that_raises_leaves_everything_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    before, rng = state_of(model), torch.get_rng_state()

    def step(m):
        m(torch.randn(4, 2))
        m.eval()
        with torch.no_grad():
            m[1].weight.add_(1)
        m[0].running_mean = None
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        PROBE.replay(model, step, CastPlan("cpu", "bfloat16"))
    assert all(map(torch.equal, before, state_of(model)))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("session", [None, "bfloat16"], ids=["without a session", "in a session"])
def test_a_replay_casts_as_its_plan_says_whatever_a_session_has_switched_on(session):
    if session:
        ampx.init("torch", dtype=session, allow=[torch.softmax])
    model = Probe()
    for plan, dtype in ((None, torch.float32), (CastPlan("cpu", "bfloat16"), torch.bfloat16)):
        PROBE.replay(model, lambda m: m(torch.ones(2, 2)).sum(), plan)
        assert model.dtype == dtype
    assert torch.is_autocast_enabled("cpu") is (session is not None)


def test_a_clock_computes_as_its_plan_says_and_leaves_everything_as_it_was(monkeypatch):
    model, dtypes = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), set()
    before, rng = state_of(model), torch.get_rng_state()
    now = iter(range(1000))

    def step(m):
        dtypes.add(m[0](torch.randn(4, 2)).dtype)
        return m(torch.ones(4, 2)).sum()

    for plan, dtype in ((None, torch.float32), (CastPlan("cpu", "bfloat16"), torch.bfloat16)):
        dtypes.clear()
        seconds = PROBE.clock(model, step, plan)
        assert seconds() > 0
        assert dtypes == {dtype}
        with monkeypatch.context() as patch:
            # It began at 0, looked at 1 after a step, and ended at 2: two seconds for one step.
            patch.setattr(time, "perf_counter", lambda: next(now))
            assert seconds() == 2
    assert all(map(torch.equal, before, state_of(model)))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_are_true_in_float32_and_scaled_inside():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
    with PROBE.watch(model, Watching()) as watch:
        replayed = PROBE.replay(model, lambda m: m(torch.tensor([[2.0, 0.5]])).sum(), None, scale=1024.0)
    assert replayed.loss == 2.5
    assert list(replayed.gradients) == ["weight"]
    np.testing.assert_array_equal(replayed.gradients["weight"], np.array([[2.0, 0.5]], np.float32))
    assert replayed.gradients["weight"].dtype == np.float32
    assert replayed.parameters == {"weight": describe(np.ones((1, 2))), "idle": describe(np.ones(3))}
    assert seen(watch.readings(), "backward")[0].value.largest == 1024.0


def test_a_gradient_that_a_penalty_is_of_carries_no_loss_scale_and_agrees():
    """The norm of the gradient is that of the weights, whatever the loss is multiplied by: that is the oracle."""
    torch.manual_seed(0)
    critic, images = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 6)
    norms = []

    def step(critic):
        inputs = images.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(critic(inputs).sum(), inputs, create_graph=True)
        norms.append(slopes.float().norm().item())
        return (slopes.square().sum(1).sqrt() - 1).square().mean() + critic(images).mean()

    comparison = ampx.compare(step, critic, framework="torch", dtype="bfloat16", loss_scale=4096.0)
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    gradients = [entry for entry in comparison.modules if entry.direction == "backward"]
    assert len(gradients) > 6  # of both calls, and of the penalty
    assert [entry.module for entry in gradients if entry.parts] == []


def test_sparse_gradients_are_filled_and_names_pass_through_wrappers():
    model = torch.compile(nn.Embedding(4, 1, sparse=True), backend="eager")
    replayed = PROBE.replay(model, lambda m: m(torch.tensor([1, 1, 3])).sum(), None)
    np.testing.assert_array_equal(replayed.gradients["weight"], [[0.0], [2.0], [0.0], [1.0]])


def test_an_optimizer_that_steps_in_backward_does_not():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    PROBE.replay(model, lambda m: m(torch.ones(1, 2)).sum(), None)
    assert optimizer.state_dict()["state"] == {}
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer.state_dict()["state"] != {}


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda m: 1.0, ampx.errors.LossDtypeError),
        (lambda m: m(torch.ones(3, 2)), ampx.errors.LossShapeError),
        (lambda m: torch.ones(()), ampx.errors.DetachedLossError),
        (lambda m: torch.ones((), dtype=torch.int64), ampx.errors.LossDtypeError),
    ],
    ids=["a number", "several elements", "detached", "an integer"],
)
def test_what_is_no_loss_is_refused(loss, error):
    with pytest.raises(error, match="accepted: "):
        PROBE.replay(nn.Linear(2, 1), loss, None)


def test_replay_works_without_gradients_around_and_in_a_protocol_that_is_under_way():
    amp = ampx.init("torch", dtype="float16", loss_scale=1024.0)
    model = nn.Linear(2, 1)
    opt = amp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), opt) as scaled:
        scaled.backward()
    pending = model.weight.grad.clone()
    with torch.no_grad():
        replayed = PROBE.replay(model, lambda m: m(torch.ones(1, 2)).sum(), None)
    np.testing.assert_array_equal(replayed.gradients["weight"], [[1.0, 1.0]])
    assert torch.equal(model.weight.grad, pending)
    opt.step()
    assert opt.last_step.applied


def test_what_somebody_else_puts_around_the_calls_of_modules_stays(monkeypatch):
    calls = []
    with PROBE.watch(None, Watching()) as watch:
        inner = nn.Module.__call__

        def counted(self, *args, **kwargs):
            calls.append(type(self))
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", counted)
        nn.ReLU()(torch.ones(1))
    with PROBE.watch(None, Watching()) as later:
        nn.ReLU()(torch.ones(1))
    nn.ReLU()(torch.ones(1))
    assert (len(watch.readings()), len(later.readings()), calls) == (1, 1, [nn.ReLU] * 3)
    monkeypatch.undo()
    with PROBE.watch(None, Watching()):
        pass
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


@pytest.mark.gpu(needs="kernels of recurrent layers")
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM], ids=["GRU", "LSTM"])
def test_recurrent_layers_whose_last_states_nobody_uses_are_read_on_a_gpu(layer):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": layer(2, 16, batch_first=True), "head": nn.Linear(16, 4)}).cuda()
    inputs = torch.randn(16, 8, 2, device="cuda")

    def step(model):
        return model["head"](model["layer"](inputs)[0][:, -1]).float().square().mean()

    compared = ampx.compare(step, model, framework="torch", device="cuda", dtype="float16")
    assert "agrees with float32" in compared.verdict
    assert ampx.diagnose(step, model, framework="torch", device="cuda", dtype="float16").kind == "healthy"
