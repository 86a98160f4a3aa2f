"""`ampx run` in PyTorch, region by region: what an unedited loop sees and trains.

The losses are made of elementwise operations, which autocast leaves in float32, and loss scales are powers of two. So
the oracle of most tests is the same loop without ampx, to the bit.
"""

import copy
import gc
import json
import math
import pickle
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import ampx  # noqa: E402
from ampx.backend import offer  # noqa: E402
from ampx.plugins import default_registry  # noqa: E402
from ampx.run import Automation, Run, RunSettings  # noqa: E402

BOTH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@pytest.fixture(autouse=True)
def untouched():
    """Nothing that is patched stays patched."""
    touched = [
        (torch.autograd, "backward"),
        (torch.optim.Optimizer, "__init__"),
        (torch.optim.Optimizer, "__setstate__"),
        (torch.optim.Optimizer, "add_param_group"),
        (torch.Tensor, "register_hook"),
        (torch.Tensor, "register_post_accumulate_grad_hook"),
        (torch.Tensor, "retain_grad"),
        (torch.autograd, "grad"),
        (torch.autograd.graph, "register_multi_grad_hook"),
        (torch.autograd.function.BackwardCFunction, "apply"),
        (torch._C._functions.MulBackward0, "register_hook"),
        (torch._C._functions.MulBackward0, "register_prehook"),
        (torch.library, "register_autograd"),
        (torch.nn.parallel.DistributedDataParallel, "register_comm_hook"),
        *((torch.nn.modules.module, f"register_module_full_backward_{hook}") for hook in ("hook", "pre_hook")),
        (torch.nn.Module, "register_full_backward_hook"),
        (torch.nn.Module, "register_full_backward_pre_hook"),
        (torch.amp.autocast_mode.autocast, "__init__"),
        *((torch.amp.GradScaler, name) for name in ("__init__", "scale", "step", "unscale_", "update", "state_dict")),
    ]
    before = [getattr(owner, name) for owner, name in touched]
    yield
    assert [getattr(owner, name) for owner, name in touched] == before
    assert not {"grad", "_grad"} & vars(torch.Tensor).keys()
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ampx.NotInitializedError):
        ampx.current("torch")


def run_of(dtype="float16", **settings):
    return Run("torch", RunSettings(dtype=dtype, device="cpu", **settings))


def automated(run):
    return offer(default_registry().load("torch"), Automation).automate(run)


def same(loop, dtype="float16", **settings):
    """Run a loop plainly and automated; both must give the same. Returns the run."""
    expected = loop()
    run = run_of(dtype, **settings)
    with automated(run):
        trained = loop()
    assert trained == expected
    return run


def weights(*values):
    return torch.nn.Parameter(torch.tensor(values))


class Spy:
    """Notes the gradient that backward brings, as torch's own code sees it: what is shown to a script is unscaled."""

    def __init__(self, seen):
        self.seen = seen
        self.__module__ = "torch.spy"

    def __call__(self, gradient):
        self.seen.append(gradient.item())

    @classmethod
    def apply(cls, x, seen):
        spied = x.clone()
        spied.register_hook(cls(seen))
        return spied


def test_gradients_do_carry_the_scale_inside_backward():
    """The proof that the other tests prove anything: what is not the script's sees the scaled gradient."""
    seen = []
    w = weights(1.0)
    with automated(run_of()):
        optimizer = torch.optim.SGD([w], lr=0.5)
        Spy.apply(w, seen).sum().backward()
        optimizer.step()
    assert seen == [65536.0]
    assert w.item() == 0.5


def test_a_loss_carries_the_scale_of_the_optimizers_it_reaches():
    seen = []
    a, b = weights(1.0), weights(1.0)
    with automated(run_of()):
        first, second = torch.optim.SGD([a], lr=0.5), torch.optim.SGD([b], lr=0.5)
        (b * float("inf")).sum().backward()
        second.step()  # its scale backs off
        second.zero_grad()
        for reached in (a, b, a + b):
            Spy.apply(reached * 1.0, seen).sum().backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    assert seen == [65536.0, 32768.0, 32768.0]


@BOTH
def test_the_script_s_own_clipping_sees_true_gradients(dtype):
    def loop():
        w, norms = weights(3.0, 4.0), []
        optimizer = torch.optim.SGD([w], lr=0.5)
        for _ in range(3):
            (w * w).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_([w], 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return w.tolist(), norms

    same(loop, dtype)


def test_gradients_read_or_changed_by_hand_are_true():
    def loop():
        a, b = weights(3.0), weights(4.0)
        optimizer = torch.optim.SGD([a, b], lr=0.5)
        (a * b).sum().backward()
        read = [a.grad.item(), b.grad.item()]
        a.grad.mul_(0.5)
        b.grad = torch.tensor([2.0])
        optimizer.step()
        return read, a.tolist(), b.tolist()

    same(loop)


@BOTH
def test_accumulation_goes_on_after_a_look_at_the_gradients(dtype):
    def loop():
        w, seen = weights(1.0, 2.0), []
        optimizer = torch.optim.SGD([w], lr=0.25)
        for factor in (1.0, 2.0, 3.0):
            (w * w * factor).sum().backward()
            seen.append(w.grad.tolist())
        torch.nn.utils.clip_grad_value_([w], 5.0)
        optimizer.step()
        return w.tolist(), seen

    run = same(loop, dtype)
    assert run.recorder.steps == 1


@BOTH
def test_one_loss_that_reaches_two_optimizers(dtype):
    """As in a GAN: the generator's loss leaves gradients on the critic, which the critic's model then drops."""

    def loop():
        critic, generator = torch.nn.Module(), torch.nn.Module()
        critic.w, generator.w = weights(1.5), weights(0.5)
        for_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        for_generator = torch.optim.Adam(generator.parameters(), lr=0.1)
        for _ in range(4):
            critic.zero_grad()
            (critic.w * critic.w).sum().backward()
            (critic.w * generator.w.detach()).sum().backward()
            for_critic.step()
            for_generator.zero_grad()
            (critic.w * generator.w).sum().backward()
            for_generator.step()
        return critic.w.item(), generator.w.item()

    run = same(loop, dtype)
    assert [record.steps for record in run.recorder.optimizers.values()] == [4, 4]
    assert all(not record.skipped for record in run.recorder.optimizers.values())


def test_pending_gradients_of_different_scales_are_brought_together():
    def loop():
        a, b = weights(1.0), weights(2.0)
        first, second = torch.optim.SGD([a], lr=0.5), torch.optim.SGD([b], lr=0.5)
        (a * float("inf")).sum().backward()  # the first optimizer's scale backs off
        if torch.is_autocast_enabled("cpu"):
            first.step()
        a.grad = None
        (b * 3.0).sum().backward()  # waits, scaled by the second's scale
        (a * b).sum().backward()
        first.step()
        second.step()
        return a.item(), b.item()

    run = same(loop)
    assert [record.scales for record in run.recorder.optimizers.values()] == [[(1, 32768.0)], []]


@BOTH
def test_backward_twice_on_one_graph_and_with_a_gradient_for_each_element(dtype):
    def loop():
        w = weights(1.0, 2.0)
        optimizer = torch.optim.SGD([w], lr=0.125)
        loss = (w * w).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (w * 3.0).backward(torch.tensor([1.0, -1.0]))
        torch.autograd.backward([w.sum(), (w * 2.0).sum()])
        optimizer.step()
        return w.tolist()

    same(loop, dtype)


def test_tensors_that_no_optimizer_holds_get_true_gradients_at_once():
    """As in adversarial training: the gradient of the input is read, and gradients add up."""

    def loop():
        w, x = weights(2.0), torch.tensor([3.0], requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.5)
        (w * x).sum().backward()
        first = x.grad.item()
        (w * x * 2.0).sum().backward()
        optimizer.step()
        return first, x.grad.item(), w.item()

    same(loop)


def change_group(w, v, optimizer):
    optimizer.add_param_group({"params": [v]})
    return [optimizer]


def change_parameter(w, v, optimizer):
    optimizer.param_groups[0]["params"][0] = v
    return [optimizer]


def change_optimizer(w, v, optimizer):
    return [torch.optim.SGD([w, v], lr=0.25)]


def change_owners(w, v, optimizer):
    return [optimizer, torch.optim.SGD([v], lr=0.25)]


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        *((change, "before backward") for change in (change_group, change_parameter, change_optimizer, change_owners)),
        *((change, "before step") for change in (change_group, change_optimizer, change_owners)),
    ],
)
def test_optimizers_that_change_late_divide_what_was_multiplied(change, moment):
    """Unfreezing, and switching the optimizer, after the steps in which operations are counted."""

    def loop():
        w, v = weights(1.0, -2.0), weights(0.5, 4.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        optimizers = [optimizer]
        for step in range(9):
            if step == 6 and moment == "before backward":
                optimizers = change(w, v, optimizer)
            w.grad = v.grad = None
            ((w * w).sum() * 0.25 + (w * v * v).sum() * 0.125).backward()
            if step == 6 and moment == "before step":
                optimizers = change(w, v, optimizer)
            for each in optimizers:
                each.step()
        return w.tolist(), v.tolist()

    same(loop)


def test_losses_that_change_in_the_middle_of_a_training_are_scaled_for_what_they_reach():
    """Alternating losses, one optimizer left out for a while, and a tensor that no optimizer holds."""

    def loop():
        a, b, free = weights(1.0, -2.0), weights(0.5, 4.0), weights(2.0, 1.0)
        optimizers = torch.optim.SGD([a], lr=0.25), torch.optim.SGD([b], lr=0.125, momentum=0.5)
        for step in range(16):
            both, alone = (a * b).sum() * 0.5, (a * a).sum() * 0.25
            penalty = (b * free).sum() * 0.0625
            loss = [both, alone, both + penalty, penalty][step // 2 % 4]
            if step % 5 == 3:  # accumulation, over losses that reach different optimizers
                ((b * b).sum() * 0.125).backward()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return a.tolist(), b.tolist(), free.grad.tolist()

    same(loop)


@BOTH
@pytest.mark.parametrize("overflows_at", [0, 2])
def test_gradients_of_a_skipped_step_may_be_cleared_before_the_next_backward_of_their_optimizer(dtype, overflows_at):
    """As in adversarial training: the other network's loss reaches them before."""

    def loop():
        skips = torch.autograd.backward is not plain
        first, second = weights(1.0, -2.0), weights(0.5, 3.0)
        optimizers = [torch.optim.Adam([parameter], lr=0.1) for parameter in (first, second)]
        for step in range(5):
            outputs = first * (step + 1)
            optimizers[1].zero_grad()
            overflows = step == overflows_at
            ((second * outputs.detach()).square().sum() * (math.inf if overflows else 1.0)).backward()
            if skips or not overflows:  # in plain float32 nobody skips it
                optimizers[1].step()
            optimizers[0].zero_grad()
            (second * outputs).sum().backward()
            optimizers[0].step()
        return first.tolist(), second.tolist()

    plain = torch.autograd.backward
    run = same(loop, dtype)
    assert [record.skipped for record in run.recorder.optimizers.values()] == [[], [overflows_at + 1]]


def test_gradients_of_a_skipped_step_that_are_stepped_with_uncleared_are_refused():
    def loop():
        first, second = weights(1.0, -2.0), weights(0.5, 3.0)
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (first, second)]
        ((second * first.detach()).sum() * math.inf).backward()
        optimizers[1].step()
        (second * first).sum().backward()
        try:
            optimizers[1].step()
        finally:
            assert second.tolist() == [0.5, 3.0]

    refused("a skipped step left", loop)


@BOTH
@pytest.mark.parametrize("how", ["in place", "data", "replaced", "clipped", "closure"])
def test_an_infinity_that_comes_after_the_script_looked_at_a_gradient_is_not_applied(how, dtype):
    w = weights(1.0, 2.0)
    run = run_of(dtype)
    with automated(run):
        optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.9)

        def infinite():
            assert w.grad.tolist() == [1.0, 1.0]
            if how == "replaced":
                w.grad = torch.tensor([float("inf"), 1.0])
            elif how == "data":
                w.grad.data += torch.tensor([float("inf"), 0.0])  # shares no version with the gradient
            else:
                w.grad[0] = float("nan")
            if how == "clipped":
                torch.nn.utils.clip_grad_value_([w], 10.0)

        def closure():
            optimizer.zero_grad()
            w.sum().backward()
            infinite()

        if how == "closure":
            optimizer.step(closure)
        else:
            w.sum().backward()
            infinite()
            optimizer.step()
        assert w.tolist() == [1.0, 2.0]
        assert not optimizer.state
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()  # nothing of it is left
        assert w.tolist() == [0.5, 1.5]
    (record,) = run.recorder.optimizers.values()
    assert (record.steps, record.skipped) == (2, [1])
    assert record.scales == ([(1, 32768.0)] if dtype == "float16" else [])


def test_gradients_are_read_once_more_only_where_the_script_looked_at_them(monkeypatch):
    from ampx_torch.gradients import GradientSet

    passes = []
    true = GradientSet.unscale

    def counted(self, gradients, scale, *arguments, **options):
        passes.append(scale)
        return true(self, gradients, scale, *arguments, **options)

    monkeypatch.setattr(GradientSet, "unscale", counted)
    with automated(run_of()):
        w = weights(1.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        for looks in (False, True, False):
            optimizer.zero_grad()
            w.sum().backward()
            if looks:
                w.grad.item()
            optimizer.step()
    assert passes == [65536.0, 65536.0, 1.0, 65536.0]


def test_gradients_averaged_by_hand_over_processes_are_skipped_in_all_of_them(run_two_ranks, tmp_path):
    """What overflows on one rank reaches both by the sum: both skip, so that their weights stay equal and finite."""
    run_two_ranks(Path(__file__).with_name("averaging_worker.py"), tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["automated"] == second["automated"]
    assert all(math.isfinite(value) for values in first["automated"] for value in values)
    for trained in (first, second):
        (optimizer,) = trained["optimizers"]
        assert 1 in optimizer["skipped"]  # what overflowed on one rank only
        assert optimizer["steps"] == 24
    assert len(optimizer["skipped"]) < 24


def test_gradients_made_by_other_means_are_taken_as_true():
    def loop():
        w = weights(2.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        (gradient,) = torch.autograd.grad((w * w).sum(), [w])
        w.grad = gradient
        optimizer.step()
        return w.item()

    same(loop)


@BOTH
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_closures_are_seen_through(kind, dtype):
    def loop():
        w = weights(3.0, -1.0)
        optimizer = kind([w], lr=0.125)

        def closure():
            optimizer.zero_grad()
            loss = (w * w * w * w).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return w.tolist(), losses

    same(loop, dtype)


@BOTH
def test_optimizers_of_the_script_keep_class_arguments_and_results(dtype):
    class Own(torch.optim.SGD):
        def step(self, closure=None, *, factor=1.0):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(factor)
            super().step()
            return factor

    def loop():
        w = weights(1.0, 2.0)
        optimizer = Own([w], lr=0.5)
        (w * w).sum().backward()
        result = optimizer.step(factor=0.5)
        return w.tolist(), result, type(optimizer) is Own, isinstance(optimizer, torch.optim.SGD)

    same(loop, dtype)


def test_optimizers_are_copied_saved_and_collected_as_ever():
    w = weights(1.0)
    with automated(run_of()):
        optimizer = torch.optim.SGD([w], lr=0.5, momentum=0.5)
        (w * 2.0).sum().backward()
        optimizer.step()
        assert list(optimizer.state_dict()) == ["state", "param_groups"]
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(twin) is torch.optim.SGD
            twin.step()
        gone = weakref.ref(optimizer)
        del optimizer, twin
        gc.collect()
        assert gone() is None


@BOTH
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.filterwarnings("error:.*wrap_optimizer")
def test_a_copied_optimizer_trains_as_the_first_one_does(copied, keeps, dtype):
    factors = []

    def loop():
        factors.clear()
        pairs = [(w := weights(1.0, 2.0), torch.optim.SGD([w], lr=0.5, momentum=0.5))]
        twin = copied(pairs[0])
        pairs = [*pairs, twin] if keeps else [twin]
        del w, twin
        for _ in range(2):
            for w, optimizer in pairs:
                w.register_hook(lambda gradient: factors.append(gradient.tolist()))  # true, as ever
                (w * w).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return factors, [(w.tolist(), type(optimizer).__name__) for w, optimizer in pairs]

    run = same(loop, dtype)
    steps = [record["steps"] for record in run.recorder.to_json()["optimizers"]]
    assert [count for count in steps if count] == [2] * (1 + keeps)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_that_a_script_only_keeps_are_left_out_of_the_report_and_of_the_step(copied):
    def loop():
        w, kept = weights(1.0, 2.0), []
        optimizer = torch.optim.SGD([w], lr=0.5)
        for _ in range(2):
            kept.append(copied(optimizer))
            (w * w).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return w.tolist(), len(kept)

    run = same(loop)
    (record,) = run.recorder.to_json()["optimizers"]
    assert record["steps"] == 2


def test_the_first_gradients_of_a_copy_carry_a_loss_scale_too():
    seen = []
    with automated(run_of()):
        w, optimizer = copy.deepcopy((w := weights(1.0), torch.optim.SGD([w], lr=0.5)))
        (Spy.apply(w, seen) * 2.0).sum().backward()
        optimizer.step()
    assert (seen, w.item()) == ([2.0**17], 0.0)


def test_optimizers_that_outlive_the_run_are_plain_again():
    w = weights(1.0)
    with automated(run_of()):
        optimizer = torch.optim.SGD([w], lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        other = torch.optim.SGD([w], lr=0.5)
        twin = copy.deepcopy(other)
    assert "step" not in {**vars(other), **vars(twin)}
    for each in (optimizer, other):
        w.grad = torch.tensor([float("inf")])
        each.step()
    scheduler.step()
    assert w.item() == float("-inf")


def test_errors_of_torch_stay_torch_s():
    w = weights(1.0, 2.0)
    with automated(run_of()):
        optimizer = torch.optim.SGD([w], lr=0.5)
        with pytest.raises(RuntimeError, match="scalar outputs") as caught:
            (w * 2.0).backward()
        assert not isinstance(caught.value, ampx.AmpxError)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
        loss = (w * w).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        optimizer.step()
    assert w.tolist() == [0.0, 0.0]


def test_checkpointed_parts_are_reached():
    """A checkpoint hides its parameters from the graph: they are reached by a backward inside backward."""
    from torch.utils.checkpoint import checkpoint

    def loop():
        a, b = weights(1.0), weights(2.0)
        first, second = torch.optim.SGD([a], lr=0.5), torch.optim.SGD([b], lr=0.5)
        x = torch.ones(1, requires_grad=True)
        (checkpoint(lambda x: x * b, x, use_reentrant=True) * a).sum().backward()
        first.step()
        second.step()
        return a.item(), b.item(), x.grad.item()

    same(loop)


# -- refusals ------------------------------------------------------------------------------------------


def refused(match, loop, **settings):
    run = run_of(**settings)
    with automated(run), pytest.raises(ampx.RunRefusedError, match=match) as caught:
        loop()
    assert run.refusal is caught.value
    assert "test_automatic.py:" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "own",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.cuda.amp.autocast(),
        lambda: torch.amp.GradScaler("cpu"),
        lambda: torch.cuda.amp.GradScaler(),
    ],
)
def test_mixed_precision_of_the_script_s_own_is_refused(own):
    refused("of its own|by itself", own)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_mixed_precision_that_is_switched_off_is_no_reason_to_refuse():
    def loop():
        w = weights(2.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler = torch.cuda.amp.GradScaler(enabled=False)
        with torch.autocast("cpu", enabled=False):
            loss = (w * w).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return w.item(), scaler.state_dict()

    same(loop)


def test_steps_inside_backward_are_refused():
    def loop():
        w = weights(1.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        w.register_hook(lambda gradient: optimizer.step())
        w.sum().backward()

    refused("from inside backward", loop)


def test_gradients_of_gradients_are_refused_where_they_are_scaled():
    def loop():
        w = weights(1.0)
        optimizer = torch.optim.SGD([w], lr=0.5)
        (w * w * w).sum().backward(create_graph=True)
        optimizer.step()

    refused("create_graph=True", loop)


def test_low_precision_parameters_are_refused():
    def loop():
        w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = torch.optim.SGD([w], lr=0.5)
        w.sum().backward()
        optimizer.step()

    refused("float16 parameters", loop)


@BOTH
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_low_precision_parameters_with_masters_of_the_script_s_own_are_refused(low, dtype):
    """Casting on top would compute in another dtype than the script says."""

    def loop():
        model = torch.nn.Linear(2, 1).to(low)
        master = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([master], lr=0.5)
        model(torch.ones(1, 2, dtype=low)).float().sum().backward()
        optimizer.step()

    refused("parameters that no optimizer holds.*--unchanged-if-refused, or leave", loop, dtype=dtype)


# -- mixed precision of the script's own, carried out by ampx ------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_script_for_cuda_amp_runs_on_the_cpu():
    """Casting is the script's regions', and the loss scale ampx's, with the settings of the script's scaler."""
    w, dtypes, scales = weights(1.0, 2.0), [], []
    run = run_of("float16", replace_native=True)
    with automated(run):
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler = torch.cuda.amp.GradScaler(init_scale=1024.0, growth_interval=1)
        for slope in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
                loss = (w * slope).sum()
            dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([w], 100.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        saved = scaler.state_dict()
    assert dtypes == [torch.float16, torch.float32] * 3
    assert w.tolist() == [0.0, 1.0]
    assert scales == [2048.0, 1024.0, 2048.0]
    assert saved == {
        "scale": 2048.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1,
        "_growth_tracker": 0,
    }
    (record,) = run.recorder.optimizers.values()
    assert (record.steps, record.skipped, record.initial_scale) == (3, [2], 1024.0)


def test_a_saved_scaler_goes_on():
    w = weights(1.0)
    state = {
        "scale": 256.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }
    with automated(run_of("float16", replace_native=True)):
        optimizer = torch.optim.SGD([w], lr=0.5)
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(state)
        assert scaler.get_scale() == 256.0
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 1024.0
        scaler.update(new_scale=8.0)
        assert scaler.get_scale() == 8.0


def test_the_script_s_dtype_holds_where_none_was_asked_for():
    with automated(run_of("auto", replace_native=True)):
        torch.optim.SGD([weights(1.0)], lr=0.5)
        with torch.autocast("cpu", dtype=torch.float16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16


def test_operations_are_counted_by_the_dtype_they_ran_in():
    model = torch.nn.Linear(4, 4)
    run = run_of("bfloat16")
    with automated(run):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert run.recorder.ops["addmm", "bfloat16"] == run.recorder.sampled_steps
    assert run.recorder.ops["mm", "bfloat16"] == run.recorder.sampled_steps
    assert set(run.recorder.seconds) == {"forward", "backward", "step"}


@pytest.mark.parametrize("early", [True, False])
def test_a_model_that_must_be_compiled_whole_is_compiled(early):
    """torch compiles nothing while a mode counts operations, and raises where the function must be whole."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def loop():
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = torch.nn.Linear(4, 1)
        if early:
            fast = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        if not early:
            fast = torch.compile(model, backend=backend, fullgraph=True)
        for factor in (1.0, 0.5, 0.25):
            fast(torch.full((2, 4), factor)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.tolist()

    plain = loop()
    run = run_of(level="O0")
    with automated(run):
        assert loop() == plain
    assert len(compiled) == 2
    assert run.recorder.steps == 3


@pytest.mark.parametrize("backward_inside", [True, False])
def test_a_compiled_step_trains_uncompiled_and_that_is_said(backward_inside):
    """torch puts back, behind a compiled function, the dispatch keys of the mode that counts operations."""

    def loop(compiles):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.25)

        def loss_of(factor):
            return (weight * factor).square().sum()

        def step(factor):
            if backward_inside:
                loss_of(factor).backward()
            optimizer.step()

        function = torch.compile(step, backend="eager") if compiles else step
        for factor in (1.0, 0.5, 0.25, 0.125, 0.5, 0.25):
            if not backward_inside:
                loss_of(factor).backward()
            function(factor)
            optimizer.zero_grad()
        return weight.tolist()

    run = run_of()
    with automated(run):
        weights = loop(True)
    assert weights == loop(False)
    assert any("runs uncompiled" in note for note in run.recorder.notes)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler reads, and does not show
@BOTH
@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("new", [True, False])
def test_a_compiled_step_may_come_after_the_steps_in_which_operations_are_counted(new, backward_inside, dtype):
    """The compiler traces what it meets then, and must not trace the making of the optimizer's wrapper."""

    def loop(compiles):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([weight], lr=0.25)

        def loss_of(factor):
            return (weight * factor).square().sum()

        def step(factor):
            if backward_inside:
                loss_of(factor).backward()
            optimizer.step()

        def train(step, backward_outside):
            for factor in (1.0, 0.5, 0.25, 0.125):
                if backward_outside:
                    loss_of(factor).backward()
                step(factor)
                optimizer.zero_grad()

        train(step, not backward_inside)
        if new:
            optimizer = torch.optim.AdamW([weight], lr=0.25)
        torch.compiler.reset()
        train(torch.compile(step, backend="eager") if compiles else step, not backward_inside)
        return weight.tolist()

    run = run_of(dtype)
    with automated(run):
        weights = loop(True)
    assert weights == loop(False)
    assert run.recorder.steps == 8
    assert any("runs uncompiled" in note for note in run.recorder.notes)
