"""`ampx run --replace-native`: what a script computes with its own GradScaler is what PyTorch gives, to the bit.

The oracle of every test is the same loop without ampx.
"""

import copy
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import ampx  # noqa: E402
from ampx.backend import offer  # noqa: E402
from ampx.events import ScaleChanged, StepSkipped  # noqa: E402
from ampx.plugins import default_registry  # noqa: E402
from ampx.run import Automation, Run, RunSettings  # noqa: E402

INF = float("inf")


def automated(run):
    return offer(default_registry().load("torch"), Automation).automate(run)


def same(loop, dtype="auto"):
    """Run a loop with PyTorch alone and automated; both must give the same. Returns the run."""
    expected = loop()
    run = Run("torch", RunSettings(dtype=dtype, device="cpu", replace_native=True))
    with automated(run):
        trained = loop()
    assert trained == expected
    return run


def lists(values):
    return [value.tolist() for value in values]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def region():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, generator=generator) for _ in range(count)]


def gradient_penalty(net, optimizer, scaler, x):
    """As on PyTorch's page of AMP examples."""
    with region():
        loss = net(x).float().pow(2).mean()
    scaled = torch.autograd.grad(scaler.scale(loss), net.parameters(), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    gradients = [gradient * inverse for gradient in scaled]
    with region():
        norm = sum(gradient.pow(2).sum() for gradient in gradients).sqrt()
        loss = loss + norm
    scaler.scale(loss).backward()
    return norm.item()


def input_gradient(net, optimizer, scaler, x):
    """As in adversarial training: the gradient of the input, divided by hand."""
    delta = torch.zeros_like(x, requires_grad=True)
    with region():
        loss = net(x + delta).float().pow(2).mean()
    scaler.scale(loss).backward()
    return (delta.grad / scaler.get_scale()).tolist()


def scaled_bound(net, optimizer, scaler, x):
    with region():
        loss = net(x).float().pow(2).mean()
    scaler.scale(loss).backward()
    return torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01 * scaler.get_scale()).item()


def divided_by_hand(net, optimizer, scaler, x):
    scaler.scale(net(x).pow(2).mean()).backward()
    for p in net.parameters():
        p.grad.div_(scaler._scale)
    optimizer.step()
    scaler.scale(net(x).mean()).backward()  # for the step that follows
    return [p.grad.sum().item() for p in net.parameters()]


def second_derivatives(net, optimizer, scaler, x):
    scaled = scaler.scale(net(x).pow(2).mean())
    scaled.backward(create_graph=True)
    return [p.grad.sum().item() for p in net.parameters()]


def hooks(net, optimizer, scaler, x):
    seen = []
    weight = net[0].weight
    handles = [
        weight.register_hook(lambda gradient: seen.append(gradient.sum().item())),
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.sum().item())),
    ]
    scaler.scale(net(x).pow(2).mean()).backward()
    for handle in handles:
        handle.remove()
    return seen


def accumulated(net, optimizer, scaler, x):
    for half in x.chunk(2):
        scaled = scaler.scale(net(half).pow(2).mean())
        (scaled / 2).backward()
    return scaled.item()


def several_losses(net, optimizer, scaler, x):
    losses = scaler.scale([net(x).mean(), net(x).pow(2).mean()])
    torch.autograd.backward(losses)
    return [loss.item() for loss in losses]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    "recipe",
    [
        gradient_penalty,
        input_gradient,
        scaled_bound,
        divided_by_hand,
        second_derivatives,
        hooks,
        accumulated,
        several_losses,
    ],
    ids=lambda recipe: recipe.__name__,
)
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscale_"])
def test_a_recipe_has_the_values_of_pytorch(recipe, unscales):
    def loop():
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=1000.0, growth_interval=2
        )  # no power of two: every digit counts
        seen = []
        for x in batches():
            optimizer.zero_grad()
            seen.append(recipe(net, optimizer, scaler, x))
            if unscales:
                scaler.unscale_(optimizer)
                seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
            seen.append([p.grad.sum().item() for p in net.parameters()])
            scaler.step(optimizer)
            scaler.update()
            seen += [scaler.get_scale(), scaler._scale.item(), scaler.state_dict()]
        return seen, lists(net.parameters())

    same(loop)


def test_input_gradients_are_divided_by_the_scale_where_a_dtype_was_asked_for_too():
    def loop():
        net, scaler = network(), torch.amp.GradScaler("cpu", init_scale=512.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = batches(1)[0].requires_grad_()
        scaler.scale(net(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        return (x.grad / scaler.get_scale()).tolist(), lists(net.parameters())

    same(loop, "float16")


def test_operations_of_the_scaler_and_of_ampx_are_not_counted():
    net, scaler = network(), None
    run = Run("torch", RunSettings(device="cpu", replace_native=True))
    with automated(run):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for x in batches():
            with region():
                loss = net(x).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert run.recorder.ops["addmm", "bfloat16"] == 6
    assert not [name for name, _ in run.recorder.ops if name.startswith(("_amp", "mkldnn", "_foreach"))]


def test_optimizers_of_one_scaler_share_its_scale_and_skip_each_for_itself():
    def loop():
        first, second = (torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
        optimizers = torch.optim.SGD([first], lr=0.5), torch.optim.Adam([second], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        seen = []
        for slope in (1.0, INF, 1.0, 1.0, 1.0):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale((first * slope).sum() + second.sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            seen += [first.tolist(), second.tolist(), scaler.get_scale()]
        return seen

    run = same(loop)
    sgd, adam = run.recorder.optimizers.values()
    assert (sgd.kind, sgd.steps, sgd.skipped) == ("SGD", 5, [2])
    assert (adam.kind, adam.steps, adam.skipped) == ("Adam", 5, [])
    assert sgd.scales == adam.scales == [(2, 512.0), (4, 1024.0)]
    assert sgd.initial_scale == 1024.0


def test_a_step_of_the_scaler_returns_what_the_optimizer_s_does():
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.steps += 1
            return self.steps

    def loop():
        net, scaler, returned = network(), torch.amp.GradScaler("cpu"), []
        optimizer = Counting(net.parameters(), lr=0.1)
        for factor in (1.0, INF, 1.0):
            scaler.scale(net(torch.ones(2, 8)).mean() * factor).backward()
            returned.append(scaler.step(optimizer))
            scaler.update()
            optimizer.zero_grad()
        assert returned == [1, None, 2]
        return returned

    same(loop)


def test_skipped_steps_and_scales_are_events():
    heard = []
    run = Run("torch", RunSettings(device="cpu", replace_native=True))
    with automated(run):
        w = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([w], lr=0.5)
        run.amp.on_event(heard.append)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for slope in (INF, INF, 1.0):
            optimizer.zero_grad()
            scaler.scale((w * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    kinds = [(type(event), event.step, event.scale, event.next_scale, event.consecutive_skips) for event in heard]
    assert kinds == [
        (StepSkipped, 1, 8.0, 4.0, 1),
        (ScaleChanged, 1, 8.0, 4.0, 1),
        (StepSkipped, 2, 4.0, 2.0, 2),
        (ScaleChanged, 2, 4.0, 2.0, 2),
    ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fused_optimizers_step_by_their_own_kernel(kind):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def loop():
        w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = kind([w], lr=0.5, fused=True, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for slope in (1.0, INF, 1.0):
            optimizer.zero_grad()
            scaler.scale((w * w * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            seen += [w.tolist(), scaler.get_scale()]
        return seen

    (record,) = same(loop).recorder.optimizers.values()
    assert (record.steps, record.skipped) == (3, [2])


def test_a_first_step_that_overflows_leaves_no_momentum_of_a_fused_optimizer():
    """PyTorch makes the momentum uninitialised and leaves it so."""
    with automated(Run("torch", RunSettings(device="cpu", replace_native=True))):
        w = torch.nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.9, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for slope in (INF, 1.0):
            optimizer.zero_grad()
            scaler.scale((w * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if slope == INF:
                assert optimizer.state[w].get("momentum_buffer") is None
        assert (w.item(), scaler.get_scale()) == (0.5, 2.0)


def test_a_quotient_that_overflows_is_skipped_with_a_scale_below_one():
    with automated(Run("torch", RunSettings(device="cpu", replace_native=True))):
        w = torch.nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-14)
        scaler.scale(w.sum())
        w.grad = torch.tensor([1e38])  # scaled: the true gradient is beyond float32
        scaler.step(optimizer)
        scaler.update()
        assert (w.item(), scaler.get_scale()) == (1.0, 2.0**-15)


# -- copies --------------------------------------------------------------------------------------------


def saved_by_torch(scaler):
    buffer = io.BytesIO()
    torch.save({"scaler": scaler}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["scaler"]


@pytest.mark.parametrize(
    "twin_of",
    [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler)), saved_by_torch],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_scaler_is_copied_and_saved_and_the_copy_scales(twin_of):
    def loop():
        w = torch.nn.Parameter(torch.tensor([4.0]))
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)

        def step(scaler, slope):
            optimizer.zero_grad()
            scaler.scale((w * slope).sum()).backward()
            seen = w.grad.item()
            scaler.step(optimizer)
            scaler.update()
            return seen, w.item(), scaler.get_scale()

        seen = [step(scaler, 1.0)]
        twin = twin_of(scaler)
        assert type(twin) is torch.amp.GradScaler
        seen += [step(twin, slope) for slope in (1.0, INF, 1.0)]
        return [*seen, step(scaler, 1.0), twin.state_dict(), scaler.state_dict()]

    (record,) = same(loop).recorder.optimizers.values()
    assert (record.steps, record.skipped) == (5, [3])


def test_a_scaler_that_was_unpickled_is_refused_like_one_that_was_made():
    scaler = pickle.loads(pickle.dumps(torch.amp.GradScaler("cpu")))
    run = Run("torch", RunSettings(dtype="float16", device="cpu"))
    with automated(run), pytest.raises(ampx.RunRefusedError, match="a GradScaler of its own"):
        scaler.scale(torch.ones(()))


def test_a_class_of_the_script_s_own_keeps_its_methods():
    class Halving(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(self._scale.item() / 2)

    def loop():
        w = torch.nn.Parameter(torch.tensor([4.0]))
        optimizer, scaler = torch.optim.SGD([w], lr=0.5), Halving("cpu", init_scale=64.0)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(w.sum()).backward()
            seen.append(w.grad.item())
            scaler.step(optimizer)
            scaler.update()
        return seen, w.item(), scaler.get_scale()

    (record,) = same(loop).recorder.optimizers.values()
    assert record.scales == [(1, 32.0), (2, 16.0), (3, 8.0)]


# -- errors --------------------------------------------------------------------------------------------


def outcome(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            result = (type(error), str(error))
    return result, [(warning.category, str(warning.message)) for warning in caught]


def test_errors_of_autocast_are_pytorch_s():
    def tries():
        return [
            outcome(lambda arguments=arguments, options=options: torch.autocast(*arguments, **options).fast_dtype)
            for arguments, options in [
                ((torch.device("cpu"),), {}),
                ((1,), {}),
                ((), {}),
                (("nowhere",), {}),
                (("cpu", "float16"), {}),
                (("cpu", torch.float64), {}),
                (("cpu",), {"unknown": 1}),
                (("xpu",), {}),
            ]
        ]

    same(tries)


def test_errors_of_the_scaler_are_pytorch_s():
    def tries():
        w = torch.nn.Parameter(torch.tensor([1.0]))
        optimizer, scaler = torch.optim.SGD([w], lr=0.5), torch.amp.GradScaler("cpu")
        seen = [outcome(lambda: scaler.step(optimizer)), outcome(lambda: scaler.unscale_(optimizer))]
        scaler.scale(w.sum())
        seen += [outcome(lambda: scaler.step(optimizer)), outcome(scaler.update)]
        scaler.scale(w.sum()).backward()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(w.sum())
        scaler.unscale_(optimizer)
        seen.append(outcome(lambda: scaler.unscale_(optimizer)))
        seen.append(outcome(lambda: scaler.step(optimizer, closure=lambda: None)))
        scaler.step(optimizer)
        seen += [outcome(lambda: scaler.step(optimizer)), outcome(lambda: scaler.unscale_(optimizer))]
        return [*seen, outcome(lambda: scaler.load_state_dict({})), w.item()]

    same(tries)


def test_a_refusal_in_a_step_names_its_place_once():
    def loop():
        w = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.5)

        def closure():
            optimizer.zero_grad()
            torch.autocast("cpu").__enter__()

        optimizer.step(closure)

    run = Run("torch", RunSettings(dtype="float16", device="cpu"))
    with automated(run), pytest.raises(ampx.RunRefusedError) as caught:
        loop()
    assert str(caught.value).count("test_automatic_scaler.py") == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_closures_that_leave_the_scaler_out_train_on_true_gradients(kind):
    """GradScaler refuses closures, so that a script with LBFGS in one of its modes has to step without it."""

    def loop():
        net, scaler, (x,) = network(), torch.amp.GradScaler("cpu"), batches(1)
        optimizer = kind(net.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return losses, scaler.get_scale(), lists(net.parameters())

    same(loop)


def test_a_copied_optimizer_is_unscaled_and_stepped_by_the_scaler():
    def loop():
        net, scaler = network(), torch.amp.GradScaler("cpu")
        pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5))]
        pairs.append(copy.deepcopy(pairs[0]))
        for x in batches(2):
            for twin, optimizer in pairs:
                scaler.scale(twin(x).pow(2).mean()).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        return [lists(twin.parameters()) for twin, _ in pairs]

    run = same(loop)
    assert [record["steps"] for record in run.recorder.to_json()["optimizers"]] == [2, 2]
