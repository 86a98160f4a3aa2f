"""`ampx run` with a loss scale: every public way by which a script sees or changes gradients, against plain Python.

Numbers are those of plain Python, or the script is refused before its first step is applied, or the report's headline
names what read them. The table is that of docs/how-to/use-paddle.md.
"""

import numpy as np
import paddle
import pytest

import ampx
from ampx.run import Run, RunSettings
from ampx_paddle.run import automate

BOUND = 1e-3
# Paddle says so of itself wherever it builds a program.
pytestmark = pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning")


class Clamp(paddle.autograd.PyLayer):
    """Not linear in gradients."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clip(-BOUND, BOUND)


def apply_clamp(hidden):
    return Clamp.apply(hidden)


class Slope(paddle.autograd.PyLayer):
    """A loss that makes its own gradient, whatever comes from behind."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensor()
        return x.tanh()


class Recomputed(paddle.autograd.PyLayer):
    """Computes a layer again in its backward, and has its parameters get their gradients there."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensor()[0].detach()
        x.stop_gradient = False
        with paddle.enable_grad():
            y = Clamp.apply(ctx.layer(x))
        (result,) = paddle.grad(y, [x], [gradient], retain_graph=True)
        y.backward(gradient)
        return result


class BoundedClip(paddle.nn.ClipGradByGlobalNorm):
    """A clip class of the script's own."""

    def _dygraph_clip(self, params_grads):
        return [(parameter, gradient.clip(-BOUND, BOUND)) for parameter, gradient in params_grads]


class ReadingSGD(paddle.optimizer.SGD):
    """An optimizer of the script's own that looks at gradients in its step."""

    def step(self):
        for parameter in self._parameter_list:
            parameter.grad = parameter.grad.clip(-BOUND, BOUND)
        super().step()


class Script:
    """Two layers and an optimizer; a way changes one of its steps. What it sees goes to `seen`."""

    def __init__(self):
        paddle.seed(3)
        self.first, self.second = paddle.nn.Linear(3, 4), paddle.nn.Linear(4, 1)
        self.parameters = [*self.first.parameters(), *self.second.parameters()]
        self.optimizer = self.make_optimizer()
        self.seen = []

    def make_optimizer(self):
        return paddle.optimizer.SGD(0.5, parameters=self.parameters)

    def forward(self, x):
        return self.second(self.middle(paddle.tanh(self.first(x))))

    def middle(self, hidden):
        return hidden

    def loss(self, x):
        return self.forward(x).square().mean()

    def backward(self, x):
        self.loss(x).backward()

    def between(self):
        """What the script does between backward and step."""

    def clear(self):
        self.optimizer.clear_grad()

    def run(self):
        rng = np.random.default_rng(0)
        for _ in range(6):
            self.backward(paddle.to_tensor(rng.normal(size=(5, 3)).astype("float32")))
            self.between()
            self.optimizer.step()
            self.clear()
        return [parameter.tolist() for parameter in self.parameters], self.seen


class PyLayerClamps(Script):
    def middle(self, hidden):
        return Clamp.apply(hidden)


class PyLayerMakesItsOwnGradient(Script):
    def loss(self, x):
        return Slope.apply(self.forward(x))


class PyLayerRecomputes(Script):
    def forward(self, x):
        return self.second(Recomputed.apply(self.first(x), paddle.nn.Tanh()))


class PyLayerRecomputesParameters(Script):
    def forward(self, x):
        return Recomputed.apply(paddle.tanh(self.first(x)), self.second)


class PyLayerInACompiledStep(PyLayerClamps):
    def __init__(self):
        super().__init__()
        self.middle = paddle.jit.to_static(apply_clamp, full_graph=False)


class HookOnAnActivation(Script):
    def middle(self, hidden):
        hidden.register_hook(lambda gradient: gradient.clip(-BOUND, BOUND))
        hidden.register_hook(lambda gradient: self.seen.append(gradient.tolist()))
        return hidden


class HookOnAParameter(Script):
    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient.clip(-BOUND, BOUND))


class HookByALayersHook(Script):
    def __init__(self):
        super().__init__()
        self.first.register_forward_post_hook(self.hook)

    def hook(self, layer, inputs, output):
        output.register_hook(lambda gradient: paddle.where(gradient.abs() > BOUND, gradient, gradient * 2))


class HookOnSparseRows(Script):
    def __init__(self):
        super().__init__()
        self.table = paddle.nn.Embedding(3, 4, sparse=True)
        self.optimizer._parameter_list.append(self.table.weight)
        self.table.weight.register_hook(lambda gradient: self.seen.append(gradient.numpy().tolist()))

    def middle(self, hidden):
        return hidden + self.table(paddle.to_tensor([0, 1, 1, 0, 1]))


class GradRead(Script):
    def between(self):
        self.seen.append([parameter.grad.tolist() for parameter in self.parameters])


class GradReplaced(Script):
    def between(self):
        for parameter in self.parameters:
            parameter.grad = parameter.grad.clip(-BOUND, BOUND)


class GradWrittenInPlace(Script):
    def between(self):
        with paddle.no_grad():
            for parameter in self.parameters:
                parameter.grad.clip_(-BOUND, BOUND)


class GradAsNumbers(Script):
    def between(self):
        self.seen.append(self.first.weight.gradient().tolist())


class ClippedByPaddle(Script):
    def between(self):
        self.seen.append(float(paddle.nn.utils.clip_grad_norm_(self.parameters, 1e-2)))


class ClippedByValue(Script):
    def between(self):
        paddle.nn.utils.clip_grad_value_(self.parameters, BOUND)


class FlatBuffer(Script):
    """Copied into one tensor, clipped there, and split again."""

    def between(self):
        flat = paddle.concat([parameter.grad.flatten() for parameter in self.parameters]).clip(-BOUND, BOUND)
        parts = flat.split([int(parameter.size) for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.reshape(parameter.shape)


class KeptWhileTheyAddUp(Script):
    """Paddle adds to the tensors that were got once, until they are cleared."""

    kept = ()

    def backward(self, x):
        super().backward(x)
        self.kept = self.kept or [parameter.grad for parameter in self.parameters]
        super().backward(x * 2)
        self.seen.append([gradient.tolist() for gradient in self.kept])
        with paddle.no_grad():
            for gradient in self.kept:
                gradient.clip_(-BOUND, BOUND)

    def clear(self):
        with paddle.no_grad():
            for gradient in self.kept:
                gradient.zero_()


class PaddleGrad(Script):
    def backward(self, x):
        loss = self.loss(x)
        gradients = paddle.grad(loss, self.parameters, retain_graph=True)
        self.seen.append([gradient.tolist() for gradient in gradients])
        loss.backward()


class Penalty(Script):
    def loss(self, x):
        x.stop_gradient = False
        outputs = self.forward(x)
        (slope,) = paddle.grad(outputs.sum(), [x], create_graph=True)
        return outputs.square().mean() + slope.square().sum(1).sqrt().mean()


class Jacobian(Script):
    def loss(self, x):
        flat = x.reshape([-1])
        flat.stop_gradient = False
        outputs = self.forward(flat.reshape([5, 3]))
        self.seen.append(paddle.autograd.jacobian(outputs.reshape([-1]), flat)[:].tolist())
        return outputs.square().mean()


class SavedTensors(Script):
    """They are activations, and no gradients."""

    def loss(self, x):
        with paddle.autograd.saved_tensors_hooks(self.pack, paddle.to_tensor):
            return super().loss(x)

    def pack(self, tensor):
        self.seen.append(tensor.tolist())
        return tensor.numpy()


class ClipClassOfItsOwn(Script):
    def make_optimizer(self):
        return paddle.optimizer.SGD(0.5, parameters=self.parameters, grad_clip=BoundedClip(1.0))


class OptimizerOfItsOwn(Script):
    def make_optimizer(self):
        return ReadingSGD(0.5, parameters=self.parameters)


class OptimizersBackward(Script):
    def backward(self, x):
        loss = self.loss(x)
        loss.backward()
        self.seen.append([gradient.tolist() for _, gradient in self.optimizer.backward(loss)])


TRUE = [
    *(PyLayerClamps, PyLayerMakesItsOwnGradient, PyLayerRecomputes, PyLayerRecomputesParameters),
    *(PyLayerInACompiledStep, HookOnAnActivation, HookOnAParameter, HookByALayersHook, HookOnSparseRows),
    *(
        GradRead,
        GradReplaced,
        GradWrittenInPlace,
        GradAsNumbers,
        ClippedByPaddle,
        ClippedByValue,
        FlatBuffer,
        KeptWhileTheyAddUp,
    ),
    *(PaddleGrad, Penalty, Jacobian, SavedTensors, ClipClassOfItsOwn, OptimizerOfItsOwn, OptimizersBackward),
]


@pytest.fixture
def run():
    return Run("paddle", RunSettings(level="O0", device="cpu"))


@pytest.mark.filterwarnings("ignore:(?s).*is deprecated since 2.1.0")  # Tensor.gradient
@pytest.mark.parametrize("script", TRUE)
def test_what_a_script_sees_and_makes_of_gradients_is_plain_paddles(run, script):
    """The scale moves in the course of it; it is a power of two, so that nothing is rounded."""
    plain = script().run()
    with automate(run):
        run.session(loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
        automated = script().run()
    assert automated == plain
    assert plain[0] != Script().run()[0] or plain[1], "the way does nothing"


# -- what is refused -------------------------------------------------------------------------------------------------


class GradOfAnInput(Script):
    def backward(self, x):
        x.stop_gradient = False
        super().backward(x)
        self.seen.append(x.grad)


class GradOfAnActivation(Script):
    def middle(self, hidden):
        hidden.retain_grads()
        self.hidden = hidden
        return hidden

    def between(self):
        self.seen.append(self.hidden.grad)


class GradReadInAHook(Script):
    def middle(self, hidden):
        hidden.register_hook(lambda _: self.seen.append(self.second.weight.grad))
        return hidden

    def backward(self, x):
        super().backward(x)
        super().backward(x)


class MainGradByAHook(Script):
    def __init__(self):
        super().__init__()
        weight = self.first.weight
        weight.register_hook(lambda gradient: setattr(weight, "main_grad", gradient))


class ApplyGradients(Script):
    def between(self):
        pairs = [(parameter, parameter.grad) for parameter in self.parameters]
        with paddle.no_grad():
            self.optimizer.apply_gradients(pairs)


class PyLayerInAProgram(PyLayerClamps):
    def __init__(self):
        super().__init__()
        self.middle = paddle.jit.to_static(apply_clamp, full_graph=True)


class MixPrecisionLayer(Script):
    def __init__(self):
        from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

        super().__init__()
        MixPrecisionLayer(self.first)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (GradOfAnInput, "no optimizer holds"),
        (GradOfAnActivation, "no optimizer holds"),
        (GradReadInAHook, "while a backward runs"),
        (MainGradByAHook, "into main_grad"),
        (ApplyGradients, "apply_gradients"),
        (PyLayerInAProgram, "part of a program"),
        (MixPrecisionLayer, "MixPrecisionLayer by itself"),
    ],
)
def test_what_cannot_be_made_true_is_refused_before_the_first_step_is_applied(run, script, reason):
    script = type(script.__name__, (script,), {})
    scripts = []
    initialize = script.__init__
    script.__init__ = lambda self: (scripts.append(self), initialize(self))[1]
    with automate(run):
        run.session(loss_scale=1024.0)
        with pytest.raises(ampx.RunRefusedError, match=reason):
            script().run()
    assert run.recorder.steps == 0
    paddle.seed(3)
    expected = [*paddle.nn.Linear(3, 4).parameters(), *paddle.nn.Linear(4, 1).parameters()]
    assert [parameter.tolist() for parameter in scripts[0].parameters] == [value.tolist() for value in expected]


# -- programs --------------------------------------------------------------------------------------------------------


def build_program(middle):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [5, 3])
        x.stop_gradient = False
        loss = middle(paddle.nn.Linear(3, 4)(x)).square().mean()
        paddle.optimizer.SGD(0.5).minimize(loss)


def clamped(hidden):
    return paddle.static.nn.static_pylayer(lambda x: x * 1, [hidden], lambda gradient: gradient.clip(-BOUND, BOUND))


def test_a_backward_of_the_scripts_own_in_a_static_graph_is_refused(run):
    paddle.enable_static()
    with automate(run):
        run.session(loss_scale=1024.0, process_wide=False)
        with pytest.raises(ampx.RunRefusedError, match=r"test_gradients_seen\.py:\d+: .* part of a program"):
            build_program(clamped)


def test_what_prints_gradients_of_a_program_is_named_in_the_headline(run):
    paddle.enable_static()
    with automate(run):
        run.session(loss_scale=1024.0, process_wide=False)
        build_program(lambda hidden: paddle.static.Print(hidden))
    (entry,) = run.recorder.scaled
    assert entry.startswith("paddle.static.Print (test_gradients_seen.py:")


@pytest.mark.parametrize("settings", [{}, {"loss_scale": 1024.0}])
def test_the_check_of_operators_that_prints_is_named_where_losses_are_scaled(run, settings, tmp_path):
    config = paddle.amp.debugging.TensorCheckerConfig(enable=True, output_dir=str(tmp_path))
    with automate(run):
        run.session(**settings)
        script = Script()
        paddle.amp.debugging.enable_tensor_checker(config)
        try:
            script.run()
        finally:
            paddle.amp.debugging.disable_tensor_checker()
    assert [entry.partition(" (")[0] for entry in run.recorder.scaled] == (
        ["paddle.amp.debugging.enable_tensor_checker"] if settings else []
    )


def test_a_backward_gets_gradients_of_low_precision_in_float32_and_leaves_them_as_they_were(run):
    """Divided by the loss scale, they may be too small for less."""
    seen = []

    class Seen(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((gradient.dtype, gradient.tolist()))
            return gradient

    with automate(run):
        run.session(loss_scale=2.0**16)
        weight = paddle.create_parameter([2], "float32")
        optimizer = paddle.optimizer.SGD(0.5, parameters=[weight])
        low = weight.astype("bfloat16")
        low.register_hook(lambda gradient: seen.append((gradient.dtype, gradient.tolist())))
        (Seen.apply(low).astype("float32") * 2.0**-130).sum().backward()
        assert seen == [(paddle.float32, [2.0**-130] * 2)] * 2
        assert weight.grad.tolist() == [2.0**-130] * 2
        optimizer.clear_grad()


def test_a_backward_of_a_librarys_own_gets_what_paddle_hands_it(run, monkeypatch):
    seen = []

    class Seen(Clamp):
        @staticmethod
        def backward(ctx, gradient):
            seen.append(float(gradient.abs().max()))
            return gradient

    monkeypatch.setitem(Seen.backward.__globals__, "__name__", "paddle.a_layer")
    with automate(run):
        run.session(loss_scale=1024.0)
        x = paddle.ones([1])
        x.stop_gradient = False
        optimizer = paddle.optimizer.SGD(0.5, parameters=[paddle.create_parameter([1], "float32")])
        Seen.apply(x).backward()
        assert seen == [1024.0]
        optimizer.clear_grad()
