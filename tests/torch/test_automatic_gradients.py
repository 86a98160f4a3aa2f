"""Every way by which PyTorch shows a gradient to a script, or lets it change one, under `ampx run` with a loss scale.

Each program is run in plain Python first, which is the oracle. What it computes is elementwise, so in float32, and loss
scales are powers of two: the numbers must be equal to the bit. The table of `docs/how-to/run-unedited-scripts.md` has
the same rows.
"""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import ampx  # noqa: E402
from ampx.backend import offer  # noqa: E402
from ampx.plugins import default_registry  # noqa: E402
from ampx.run import Automation, Recorder, Run, RunSettings  # noqa: E402
from ampx.run.recorder import SAMPLED_STEPS  # noqa: E402

NODE = torch.autograd.graph.Node


def automated(run):
    return offer(default_registry().load("torch"), Automation).automate(run)


def run_of(sampled_steps=SAMPLED_STEPS):
    return Run("torch", RunSettings(dtype="float16", device="cpu"), Recorder(sampled_steps))


class Training:
    """A weight and another one, trained for three steps; what a program does differently, it overrides."""

    def __init__(self):
        self.seen = []
        self.w = torch.nn.Parameter(torch.tensor([3.0, -0.5, 0.25]))
        self.v = torch.nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))
        self.begin()
        self.optimizer = torch.optim.SGD([self.w, self.v], lr=0.125, momentum=0.5)
        self.prepared()
        for step in (1.0, 2.0, 0.5):
            self.one_step(step)
        self.result = self.w.tolist(), self.v.tolist(), self.seen

    def begin(self):
        """Before the optimizer is made."""

    def prepared(self):
        """After it."""

    def one_step(self, step):
        self.backward(self.middle(self.w * step))
        self.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def middle(self, hidden):
        return hidden

    def backward(self, hidden):
        (hidden * hidden * self.v).sum().backward()

    def after_backward(self):
        """Before the step."""

    def see(self, *gradients):
        self.seen.append([None if gradient is None else gradient.tolist() for gradient in gradients])


def clamped(gradient):
    return gradient.clamp(-0.5, 0.5)


def squared(gradient):
    return gradient * gradient


PROGRAMS = {}


def program(kind):
    PROGRAMS[kind.__name__] = kind
    return kind


# -- hooks -----------------------------------------------------------------------------------------


@program
class TensorHook(Training):
    def middle(self, hidden):
        hidden.register_hook(clamped)
        return hidden


@program
class TensorHookOfAParameter(Training):
    def begin(self):
        self.w.register_hook(squared)


@program
class TensorHookThatWritesInPlace(Training):
    def middle(self, hidden):
        hidden.register_hook(self.write)
        return hidden

    def write(self, gradient):
        gradient.clamp_(-0.25, 0.25)


@program
class NodeHook(Training):
    def middle(self, hidden):
        hidden.grad_fn.register_hook(lambda inner, outer: (clamped(inner[0]), *inner[1:]))
        hidden.grad_fn.register_hook(self.look)
        return hidden

    def look(self, inner, outer):
        self.see(inner[0], outer[0])


@program
class NodePrehook(Training):
    def middle(self, hidden):
        hidden.grad_fn.register_prehook(lambda outer: (squared(outer[0]),))
        return hidden


@program
class NodeHooksBehindTheFirstNode(Training):
    def backward(self, hidden):
        loss = (hidden * hidden * self.v).sum()
        node, _ = loss.grad_fn.next_functions[0]
        node.register_prehook(lambda outer: (clamped(outer[0]),))
        assert isinstance(node, NODE)
        assert node is loss.grad_fn.next_functions[0][0]
        loss.backward()


@program
class GradientEdgeHook(Training):
    def middle(self, hidden):
        torch.autograd.graph.get_gradient_edge(hidden).node.register_prehook(lambda outer: (clamped(outer[0]),))
        return hidden


@program
class HooksOfTheNodeThatAccumulates(Training):
    """As DDP by hand was written before there were hooks after accumulation; the node has to be kept."""

    def begin(self):
        self.node = self.w.expand_as(self.w).grad_fn.next_functions[0][0]
        self.node.register_prehook(lambda outer: (clamped(outer[0]),))
        self.node.register_hook(lambda inner, outer: self.see(*outer, self.w.grad))


@program
class MultiGradHook(Training):
    def middle(self, hidden):
        other = hidden * 2.0
        torch.autograd.graph.register_multi_grad_hook((hidden, other), lambda gradients: self.see(*gradients))
        return other + hidden


@program
class MultiGradHookOfAny(Training):
    def middle(self, hidden):
        torch.autograd.graph.register_multi_grad_hook((hidden,), self.see, mode="any")
        return hidden


class Doubled(torch.nn.Module):
    def forward(self, hidden):
        return hidden * 2.0


class ModuleHooks(Training):
    def begin(self):
        self.module = Doubled()
        self.register()

    def middle(self, hidden):
        return self.module(hidden)

    def look(self, module, inner, outer):
        self.see(*inner, *outer)
        return (clamped(inner[0]),)


@program
class ModuleBackwardHook(ModuleHooks):
    def register(self):
        self.module.register_full_backward_hook(self.look)


@program
class ModuleBackwardPreHook(ModuleHooks):
    def register(self):
        self.module.register_full_backward_pre_hook(hook=lambda module, outer: (squared(outer[0]),))


@program
class LegacyModuleBackwardHook(ModuleHooks):
    def register(self):
        self.module.register_backward_hook(lambda module, inner, outer: (clamped(inner[0]), *inner[1:]))


class GlobalModuleHooks(ModuleHooks):
    def __init__(self):
        super().__init__()
        self.handle.remove()
        torch.nn.modules.module._global_is_full_backward_hook = None


@program
class GlobalModuleBackwardHook(GlobalModuleHooks):
    def register(self):
        self.handle = torch.nn.modules.module.register_module_full_backward_hook(self.look)


@program
class GlobalModuleBackwardPreHook(GlobalModuleHooks):
    def register(self):
        hook = torch.nn.modules.module.register_module_full_backward_pre_hook
        self.handle = hook(lambda module, outer: (squared(outer[0]),))


@program
class LegacyGlobalModuleBackwardHook(GlobalModuleHooks):
    def register(self):
        hook = torch.nn.modules.module.register_module_backward_hook
        self.handle = hook(lambda module, inner, outer: (clamped(inner[0]), *inner[1:]))


@program
class HookAfterAccumulation(Training):
    def begin(self):
        self.w.register_post_accumulate_grad_hook(self.look)

    def look(self, parameter):
        self.see(parameter.grad)
        parameter.grad.clamp_(-2.0, 2.0)


@program
class HookAfterAccumulationOfSeveralBackwards(HookAfterAccumulation):
    def backward(self, hidden):
        super().backward(hidden)
        super().backward(self.w * 3.0)


@program
class HookAfterAccumulationThatMovesTheGradient(Training):
    """As data parallelism by hand does: into a buffer of its own, and back after backward."""

    def begin(self):
        self.buffer = torch.zeros(3)
        self.w.register_post_accumulate_grad_hook(self.move)

    def move(self, parameter):
        self.buffer.copy_(parameter.grad)
        parameter.grad = None

    def after_backward(self):
        self.w.grad = self.buffer.clamp(-1.0, 1.0)


# -- `.grad` ---------------------------------------------------------------------------------------


@program
class GradOfParameters(Training):
    def after_backward(self):
        self.see(self.w.grad, self.w._grad)
        torch.nn.utils.clip_grad_norm_([self.w, self.v], 1.0)


@program
class GradAfterTheStep(Training):
    def one_step(self, step):
        self.backward(self.w * step)
        self.optimizer.step()
        self.see(self.w.grad, self.v.grad)
        self.optimizer.zero_grad()


@program
class RetainedGrad(Training):
    def middle(self, hidden):
        hidden.retain_grad()
        self.hidden = hidden
        return hidden

    def after_backward(self):
        self.see(self.hidden.grad)


@program
class RetainedGradOfSeveralBackwards(Training):
    def backward(self, hidden):
        hidden.retain_grad()
        loss = (hidden * hidden * self.v).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        self.see(hidden.grad)


@program
class GradOfInputs(Training):
    def backward(self, hidden):
        inputs = torch.ones(3, requires_grad=True)
        (hidden * hidden * self.v * inputs).sum().backward()
        self.see(inputs.grad)


@program
class BackwardIntoTensorsThatAreNoLeaves(Training):
    def backward(self, hidden):
        (hidden * hidden * self.v).sum().backward(inputs=[hidden, self.w])
        self.see(hidden.grad)


@program
class ViewsOfAFlatBuffer(Training):
    def begin(self):
        self.buffer = torch.zeros(6)
        self.w.grad, self.v.grad = self.buffer[:3], self.buffer[3:]

    def one_step(self, step):
        self.backward(self.w * step)
        self.buffer.clamp_(-1.0, 1.0)
        self.see(self.buffer)
        self.optimizer.step()
        self.buffer.zero_()


@program
class GradientsKeptInAList(Training):
    def prepared(self):
        self.backward(self.w)
        self.kept = [self.w.grad, self.v.grad]
        self.optimizer.zero_grad(set_to_none=False)

    def one_step(self, step):
        self.backward(self.w * step)
        self.backward(self.w)
        self.see(*self.kept)
        for gradient in self.kept:
            gradient.clamp_(-1.0, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


@program
class AccumulatedGradients(Training):
    def backward(self, hidden):
        super().backward(hidden)
        super().backward(self.w * 0.5)


@program
class WeightedBackward(Training):
    def backward(self, hidden):
        weights = torch.tensor([1.0, 0.5, -2.0])
        torch.autograd.backward([hidden * hidden * self.v, hidden.sum()], [weights, torch.tensor(0.5)])
        self.see(self.w.grad)


@program
class BackwardOfAnEdge(Training):
    def backward(self, hidden):
        super().backward(hidden)
        edge = torch.autograd.graph.get_gradient_edge((self.w * self.v).sum())
        torch.autograd.backward((edge,), (torch.tensor(1.0),))


# -- backwards of the script's own -----------------------------------------------------------------


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.view_as(x), y * 2.0

    @staticmethod
    def backward(ctx, x, y):
        return clamped(x), None if y is None else squared(y)


class ClampWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return clamped(gradient)


class ClampByVjp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def vjp(ctx, gradient):
        return clamped(gradient)


@program
class OwnFunction(Training):
    def middle(self, hidden):
        return Clamp.apply(hidden, hidden)[0]


@program
class OwnFunctionWithSetup(Training):
    def middle(self, hidden):
        return ClampWithSetup.apply(hidden)


@program
class OwnFunctionByVjp(Training):
    def middle(self, hidden):
        return ClampByVjp.apply(hidden)


@program
class OwnFunctionUnderCheckpoint(Training):
    def middle(self, hidden):
        return torch.utils.checkpoint.checkpoint(ClampWithSetup.apply, hidden, use_reentrant=True)


class Checkpoint(torch.autograd.Function):
    """A checkpoint as scripts have copied it, with the backward inside backward that a subclass names."""

    @staticmethod
    def forward(ctx, run, *inputs):
        ctx.run, ctx.inputs = run, inputs
        with torch.no_grad():
            return run(*inputs)

    @classmethod
    def recompute(cls, ctx):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.inputs]
        with torch.enable_grad():
            return inputs, ctx.run(*inputs)


class CheckpointByBackward(Checkpoint):
    @staticmethod
    def backward(ctx, gradient):
        inputs, output = Checkpoint.recompute(ctx)
        torch.autograd.backward(output, clamped(gradient))
        return None, *(tensor.grad for tensor in inputs)


class CheckpointByGrad(Checkpoint):
    @staticmethod
    def backward(ctx, gradient):
        inputs, output = Checkpoint.recompute(ctx)
        return None, *torch.autograd.grad(output, inputs, clamped(gradient))


@program
class BackwardInsideOwnBackward(Training):
    def middle(self, hidden):
        return CheckpointByBackward.apply(lambda x: x * x * self.v, hidden)


@program
class GradInsideOwnBackward(Training):
    def middle(self, hidden):
        return CheckpointByGrad.apply(lambda x, v: ClampWithSetup.apply(x * x) * v, hidden, self.v)


_numbers = itertools.count()


def operation(register):
    """Make an operation whose backward clamps."""
    name = f"ampx_test::clamped_{next(_numbers)}"

    @torch.library.custom_op(name, mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    register(twice, name)
    return twice


@program
class BackwardOfAnOperation(Training):
    def begin(self):
        self.operation = operation(lambda op, name: op.register_autograd(lambda ctx, gradient: clamped(gradient)))

    def middle(self, hidden):
        return self.operation(hidden)


@program
class BackwardOfAnOperationByName(BackwardOfAnOperation):
    def begin(self):
        self.operation = operation(
            lambda op, name: torch.library.register_autograd(name, lambda ctx, gradient: clamped(gradient))
        )


# -- gradients as values ---------------------------------------------------------------------------


@program
class GradientsAsValues(Training):
    def backward(self, hidden):
        (gradient,) = torch.autograd.grad((hidden * hidden).sum(), hidden, create_graph=True)
        self.see(gradient)
        (clamped(gradient) * self.v * hidden).sum().backward()


@program
class FunctionalTransforms(Training):
    def backward(self, hidden):
        gradient = torch.func.grad(lambda x: (x * x * x).sum())(hidden)
        _, pull = torch.func.vjp(lambda x: ClampWithSetup.apply(x * x), hidden)
        self.see(gradient, *pull(torch.ones(3)))
        self.see(torch.autograd.functional.jacobian(lambda x: x * x, hidden))
        (clamped(gradient) * self.v).sum().backward()


@program
class SavedTensorHooks(Training):
    def backward(self, hidden):
        def unpack(packed):
            self.see(packed)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
            loss = (hidden * hidden * self.v).sum()
        loss.backward()


# -- processes -------------------------------------------------------------------------------------


class Weight(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, factor):
        return self.w * factor


@program
class CommunicationHookOfDdp(Training):
    def begin(self):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.model = torch.nn.parallel.DistributedDataParallel(Weight(self.w))
        self.model.register_comm_hook(None, self.exchange)

    def exchange(self, state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.see(bucket.buffer())
        work = torch.distributed.all_reduce(clamped(bucket.buffer()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def one_step(self, step):
        self.backward(self.model(step))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __init__(self):
        try:
            super().__init__()
        finally:
            torch.distributed.destroy_process_group()


@program
class CommunicationHookOfFsdp(CommunicationHookOfDdp):
    def begin(self):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.model = FullyShardedDataParallel(
            Weight(self.w),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        self.model.register_comm_hook(None, self.exchange)

    def exchange(self, state, gradient):
        self.see(gradient)
        gradient.clamp_(-0.5, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_script_sees_and_changes_the_gradients_of_plain_python(name):
    expected = PROGRAMS[name]().result
    run = run_of()
    with automated(run):
        trained = PROGRAMS[name]().result
    assert trained == expected
    assert run.recorder.scaled == []
    (record,) = run.recorder.optimizers.values()
    assert (record.steps, record.skipped, record.initial_scale) == (3, [], 65536.0)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_a_script_sees_unscaled_gradients_whatever_the_scale(scale):
    expected = PROGRAMS["TensorHook"]().result
    with automated(Run("torch", RunSettings(dtype="float16", device="cpu", loss_scale=scale))):
        assert PROGRAMS["TensorHook"]().result == expected


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_leaves_out_functions_whose_backward_is_the_script_s():
    class Compiles(Training):
        def prepared(self):
            self.one_step(1.0)  # while operations are counted, nothing is compiled
            torch.compiler.reset()
            self.middle = torch.compile(lambda hidden: ClampWithSetup.apply(hidden * 2.0) * 2.0, backend="eager")

    expected = Compiles().result
    with automated(run_of(sampled_steps=1)):
        trained = Compiles().result
    assert trained == expected


@pytest.mark.filterwarnings("ignore")
def test_the_headline_names_the_backward_of_an_operation_that_is_compiled():
    class Compiles(PROGRAMS["BackwardOfAnOperation"]):
        def prepared(self):
            self.one_step(1.0)  # while operations are counted, nothing is compiled
            self.operation.register_fake(lambda x: torch.empty_like(x))
            torch.compiler.reset()
            self.middle = torch.compile(lambda hidden: self.operation(hidden) * 2.0, backend="aot_eager")

    run = run_of(sampled_steps=1)
    with automated(run):
        Compiles()
    (named,) = run.recorder.scaled
    assert named.startswith("the compiled backward of an operation (")
    assert "test_automatic_gradients.py:" in named


@pytest.mark.filterwarnings("ignore")
def test_the_headline_names_a_mode_of_the_script_that_sees_the_operations_of_backward():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Sees(Training):
        def backward(self, hidden):
            with Mode():
                super().backward(hidden)

    run = run_of()
    with automated(run):
        Sees()
    assert run.recorder.scaled == ["the dispatch mode Mode"]


@pytest.mark.filterwarnings("ignore")
def test_gradients_in_low_precision_reach_the_script_in_float32():
    """Of tensors that are kept, and in its own backward: none underflows as the quotient in float16 would."""

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient)
            return gradient

    seen = []
    with automated(run_of()):
        first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        hidden = Seen.apply(first(torch.ones(2, 4)))
        hidden.retain_grad()
        expected = second.weight.detach().half().float().expand(2, 8) * 2.0**-13
        (second(hidden).float() * 2.0**-12).mean().backward()
        gradients = [hidden.grad, *seen]
        hidden.grad = torch.ones_like(hidden)
        assert torch.equal(hidden.grad, torch.ones_like(hidden))  # what the script wrote
        optimizer.step()
    assert hidden.dtype is torch.float16
    for gradient in gradients:
        assert gradient.dtype is torch.float32
        assert torch.equal(gradient, expected)


def refused(match, loop):
    run = run_of()
    with automated(run), pytest.raises(ampx.RunRefusedError, match=match):
        loop()
    assert run.recorder.steps == 0


@pytest.mark.filterwarnings("ignore")
def test_grad_of_a_tensor_to_which_backward_still_adds_is_refused_in_a_hook():
    class Reads(Training):
        def middle(self, hidden):
            super().backward(self.w)
            hidden.register_hook(lambda gradient: gradient + self.v.grad)
            return hidden

    refused("reads or writes `.grad`", Reads)


@pytest.mark.filterwarnings("ignore")
def test_a_backward_inside_another_that_reaches_another_optimizer_is_refused():
    class Trains(Training):
        def prepared(self):
            self.other = torch.nn.Parameter(torch.ones(3))
            self.others = torch.optim.SGD([self.other], lr=0.1)

        def middle(self, hidden):
            hidden.register_hook(self.train_other)
            return hidden

        def train_other(self, gradient):
            with torch.enable_grad():
                (self.other * gradient).sum().backward()

    refused("the outer one does not reach", Trains)


@pytest.mark.filterwarnings("ignore")
def test_steps_in_hooks_after_accumulation_are_refused():
    class Steps(Training):
        def prepared(self):
            self.w.register_post_accumulate_grad_hook(lambda parameter: self.optimizer.step())

    refused("from inside backward", Steps)


class Critic(torch.nn.Sequential):
    pass


@pytest.mark.parametrize("kind", [Critic, torch.nn.Sequential])
@pytest.mark.parametrize("named", [False, True], ids=["parameters", "named parameters"])
@pytest.mark.filterwarnings("ignore")
def test_what_several_optimizers_train_is_sampled_by_names_of_its_own_and_left_as_it_was(kind, named):
    run, sampled = Run("torch", RunSettings(dtype="bfloat16", device="cpu")), []
    run.recorder.takes_gradients = sampled.extend
    with automated(run):
        models = torch.nn.Sequential(torch.nn.Linear(2, 1)), kind(torch.nn.Linear(2, 1))
        before = [model[0].weight.tolist() for model in models]
        for model in models:
            trained = model.named_parameters() if named else model.parameters()
            optimizer = torch.optim.SGD(trained, lr=0.125)
            (model(torch.ones(1, 2)).sum() * 0.25).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert len({entry.name for entry in sampled}) == len(sampled) == 4
    weights = sampled[::2]
    assert [[entry.weights.tolist()] for entry in weights] == before
    assert [entry.values.tolist() for entry in weights] == [[0.25, 0.25]] * 2
    if kind is Critic and not named:
        assert [entry.name for entry in weights] == ["0.weight", "Critic.0.weight"]
