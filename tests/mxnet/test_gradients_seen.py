"""`ampx run` with a loss scale: every public way by which a script sees or changes gradients, against plain Python.

Numbers are those of plain Python, or the script is refused before its first step is applied, or the report's headline
names what read them. The table is that of docs/how-to/use-mxnet.md.
"""

import numpy as np
import pytest

import ampx
import processes
from ampx.run import Run, RunSettings
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import cast_tensor, name_of
from ampx_mxnet.run import automate

autograd, gluon = mx.autograd, mx.gluon
BOUND = 1e-3


class Clamp(autograd.Function):
    """Not linear in gradients."""

    def forward(self, x):
        return x * 1

    def backward(self, gradient):
        return gradient.clip(-BOUND, BOUND)


class Recomputed(autograd.Function):
    """Computes a block again in the backward, by a backward of its own in which another one is not linear."""

    def __init__(self, block):
        super().__init__()
        self._block = block

    def forward(self, x):
        self.save_for_backward(x)
        with autograd.pause():
            return self._block(x)

    def backward(self, gradient):
        x = self.saved_tensors[0].copy()
        x.attach_grad()
        with autograd.record():
            output = self.clamped(x)
        return self.differentiate(output, x, gradient)

    def clamped(self, x):
        return Clamp()(self._block(x))

    def differentiate(self, output, x, gradient):
        output.backward(gradient)
        return x.grad


class Differentiated(Recomputed):
    def differentiate(self, output, x, gradient):
        return autograd.grad(output, [x], [gradient])[0]


class Slowly:
    """Adds zeros for which MXNet works so long that its thread is done before the inner function's backward is due."""

    def clamped(self, x):
        output, wide = super().clamped(x), mx.nd.ones((400, 400))
        return output + (mx.nd.dot(wide, mx.nd.dot(wide, wide * output.mean())) * 0).mean()


class RecomputedSlowly(Slowly, Recomputed):
    pass


class DifferentiatedSlowly(Slowly, Differentiated):
    pass


def operator(name, backward, need_top_grad=True):
    """Register an operator by its backward."""

    class Operator(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], in_data[0] * 1)

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], backward(out_grad, in_data))

    class Properties(mx.operator.CustomOpProp):
        def __init__(self):
            super().__init__(need_top_grad=need_top_grad)

        def create_operator(self, ctx, shapes, dtypes):
            return Operator()

    return mx.operator.register(name)(Properties)


class BoundedSGD(mx.optimizer.Optimizer):
    """An optimizer of the script's own that bounds gradients, and never looks at the factor of the trainer."""

    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight[:] -= self.lr * grad.clip(-BOUND, BOUND)


class Script:
    """Two layers and a trainer; a way changes one of its steps. What it sees goes to `seen`."""

    grad_req = "write"
    optimizer = "sgd"
    contexts = (mx.cpu(),)

    def __init__(self):
        mx.random.seed(3)
        np.random.seed(3)
        self.first, self.second = gluon.nn.Dense(4, "tanh", in_units=3), gluon.nn.Dense(1, in_units=4)
        self.parameters = []
        for layer in (self.first, self.second):
            layer.initialize(mx.init.Normal(0.5), ctx=list(self.contexts))
            layer.collect_params().setattr("grad_req", self.grad_req)
            self.parameters += layer.collect_params().values()
        optimizer = BoundedSGD(learning_rate=0.5) if self.optimizer == "own" else self.optimizer
        options = None if self.optimizer == "own" else {"learning_rate": 0.5}
        self.trainer = gluon.Trainer(self.parameters, optimizer, options, update_on_kvstore=False)
        self.seen = []

    def forward(self, x):
        return self.second(self.middle(self.first(x)))

    def middle(self, hidden):
        return hidden

    def loss(self, x):
        return (self.forward(x) ** 2).mean()

    def backward(self, x):
        with autograd.record():
            losses = [self.loss(x.as_in_context(context)) for context in self.contexts]
        autograd.backward(losses)

    def between(self):
        """What the script does between backward and step."""

    def step(self):
        self.trainer.step(1)

    def run(self):
        rng = np.random.default_rng(0)
        for _ in range(6):
            self.backward(mx.nd.array(rng.normal(size=(5, 3))))
            self.between()
            self.step()
        return [parameter.data(self.contexts[0]).asnumpy().tolist() for parameter in self.parameters], self.seen

    def look(self, gradients):
        self.seen.append([gradient.asnumpy().tolist() for gradient in gradients])


class FunctionClamps(Script):
    def middle(self, hidden):
        return Clamp()(hidden)


class FunctionRecomputes(Script):
    function = Recomputed

    def forward(self, x):
        return self.function(self.second)(self.first(x))

    def between(self):
        mx.nd.waitall()  # the trainer does not know of parameters that it reaches


class FunctionDifferentiates(Script):
    function = Differentiated

    def forward(self, x):
        return self.second(self.function(gluon.nn.Activation("tanh"))(self.first(x)))


class FunctionRecomputesSlowly(FunctionRecomputes):
    function = RecomputedSlowly


class FunctionDifferentiatesSlowly(FunctionDifferentiates):
    function = DifferentiatedSlowly


class OperatorClamps(Script):
    def __init__(self):
        super().__init__()
        operator("clamps", lambda out_grad, in_data: out_grad[0].clip(-BOUND, BOUND))

    def middle(self, hidden):
        return mx.nd.Custom(hidden, op_type="clamps")


class OperatorMakesItsOwnGradient(Script):
    """As the loss of MXNet's own example of operators."""

    def __init__(self):
        super().__init__()
        operator("slope", lambda out_grad, in_data: in_data[0].tanh(), need_top_grad=False)

    def loss(self, x):
        return mx.nd.Custom(self.forward(x), op_type="slope")


class OperatorThatAddsUp(OperatorClamps):
    grad_req = "add"

    def forward(self, x):
        weight = self.first.weight.data()
        return self.second(mx.nd.dot(x, self.middle(weight).T) + mx.nd.dot(x, self.middle(weight).T))

    def between(self):
        self.first.bias.zero_grad()

    def step(self):
        self.trainer.step(1, ignore_stale_grad=True)
        for parameter in self.parameters:
            parameter.zero_grad()


class GradRead(Script):
    def between(self):
        self.look(parameter.grad() for parameter in self.parameters)


class GradOfAnArray(Script):
    def between(self):
        self.look(parameter.data().grad for parameter in self.parameters)


class GradWritten(Script):
    def between(self):
        for parameter in self.parameters:
            for gradient in parameter.list_grad():
                gradient[:] = gradient.clip(-BOUND, BOUND)


class ClippedByGluon(Script):
    def between(self):
        self.seen.append(gluon.utils.clip_global_norm([parameter.grad() for parameter in self.parameters], 1e-2))


class KeptInAList(Script):
    """MXNet writes to the same arrays in every backward."""

    kept = ()

    def between(self):
        self.kept = self.kept or [parameter.grad() for parameter in self.parameters]
        self.look(self.kept)
        for gradient in self.kept:
            gradient[:] = gradient.clip(-BOUND, BOUND)


class KeptBeforeTheTrainer(KeptInAList):
    def __init__(self):
        super().__init__()
        self.kept = [parameter.grad() for parameter in self.parameters]


class KeptAsAView(KeptInAList):
    def between(self):
        self.kept = self.kept or [parameter.grad().reshape((-1,)) for parameter in self.parameters]
        super().between()


class ReadOnSeveralContexts(KeptInAList):
    """Before they are added up."""

    contexts = (mx.cpu(0), mx.cpu(1))

    def between(self):
        self.kept = self.kept or [gradient for parameter in self.parameters for gradient in parameter.list_grad()]
        super().between()


class ReadWhileTheyAddUp(KeptInAList):
    grad_req = "add"

    def backward(self, x):
        super().backward(x)
        self.between()
        super().backward(x * 2)

    def step(self):
        super().step()
        for parameter in self.parameters:
            parameter.zero_grad()


class AutogradGrad(Script):
    def backward(self, x):
        variables = [parameter.data() for parameter in self.parameters]
        with autograd.record():
            loss = self.loss(x)
        self.look(autograd.grad(loss, variables, retain_graph=True))
        loss.backward()


class AutogradGradOfAFunction(AutogradGrad):
    """MXNet runs its backward in threads, at a time of its own."""

    def middle(self, hidden):
        return Clamp()(hidden)


class OptimizerOfItsOwn(Script):
    optimizer = "own"


class OperatorHook(Script):
    """It sees activations, and no gradients."""

    def __init__(self):
        super().__init__()
        self.second.hybridize()
        self.second.register_op_hook(self.note, monitor_all=True)

    def note(self, name, op, array):
        self.seen.append(op)


TRUE = [
    *(FunctionClamps, FunctionRecomputes, FunctionDifferentiates),
    *(OperatorClamps, OperatorMakesItsOwnGradient, OperatorThatAddsUp),
    *(GradRead, GradOfAnArray, GradWritten, ClippedByGluon, KeptInAList, KeptBeforeTheTrainer, KeptAsAView),
    *(ReadOnSeveralContexts, ReadWhileTheyAddUp, AutogradGrad, AutogradGradOfAFunction, OptimizerOfItsOwn),
    OperatorHook,
]


@pytest.fixture
def run():
    return Run("mxnet", RunSettings(level="O0", device="cpu"))


@pytest.mark.filterwarnings("ignore:register_op_hook is experimental:UserWarning")
@pytest.mark.parametrize("script", TRUE)
def test_what_a_script_sees_and_makes_of_gradients_is_plain_mxnets(run, script):
    """The scale moves in the course of it; it is a power of two, so that nothing is rounded."""
    plain = script().run()
    with automate(run):
        run.session(loss_scale=ampx.LossScale(init_scale=2.0**10, growth_interval=3))
        automated = script().run()
    assert automated == plain
    assert run.recorder.steps == 6
    assert plain[0] != Script().run()[0] or plain[1], "the way does nothing"


def test_an_inner_backward_and_the_one_around_it_do_not_wait_for_each_other():
    """In a process that ends if they do: spaces for temporary results belong to a thread, which may run both."""
    processes.run_python(__file__, timeout=120, check=True)


# -- what is refused -------------------------------------------------------------------------------------------------


class GradOfAnInput(Script):
    def backward(self, x):
        x.attach_grad()
        super().backward(x)


class GradOfMarkedVariables(Script):
    def backward(self, x):
        autograd.mark_variables([x], [mx.nd.zeros_like(x)])
        super().backward(x)


class GradOfOtherParameters(Script):
    def __init__(self):
        super().__init__()
        self.other = gluon.nn.Dense(3, in_units=3)
        self.other.initialize()

    def loss(self, x):
        return super().loss(self.other(x))

    def between(self):
        self.other.weight.grad()


class ReadsInItsBackward(autograd.Function):
    def __init__(self, parameter):
        super().__init__()
        self._parameter = parameter

    def forward(self, x):
        return x * 1

    def backward(self, gradient):
        return gradient + self._parameter.grad().sum()


class GradReadWhileBackwardRuns(Script):
    def middle(self, hidden):
        return ReadsInItsBackward(self.second.weight)(hidden)


class LossOperator(Script):
    def loss(self, x):
        return mx.nd.LinearRegressionOutput(self.forward(x), mx.nd.ones((5, 1)))


class LossOperatorOfAGraph(Script):
    class Net(gluon.HybridBlock):
        def hybrid_forward(self, operators, outputs):
            return operators.MakeLoss(outputs.square())

    def loss(self, x):
        net = self.Net()
        net.hybridize()
        return net(self.forward(x))


class FormerAutograd(Script):
    """Its backward knows nothing of a loss scale."""

    def backward(self, x):
        with autograd.record():
            loss = self.loss(x)
        mx.contrib.autograd.backward([loss])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (GradOfAnInput, "no trainer holds"),
        (GradOfMarkedVariables, "no trainer holds"),
        (GradOfOtherParameters, "no trainer holds"),
        (GradReadWhileBackwardRuns, "while a backward runs"),
        (LossOperator, "LinearRegressionOutput, which makes its own gradient"),
        (LossOperatorOfAGraph, "MakeLoss, which makes its own gradient"),
        (FormerAutograd, "scale_loss"),
    ],
)
def test_what_cannot_be_made_true_is_refused_before_the_first_step_is_applied(run, script, reason):
    with automate(run):
        run.session(loss_scale=1024.0)
        trained = script()
        before = [parameter.data().asnumpy().tolist() for parameter in trained.parameters]
        with pytest.raises(ampx.RunRefusedError, match=reason):
            trained.run()
        assert [parameter.data().asnumpy().tolist() for parameter in trained.parameters] == before
    assert run.recorder.steps == 0


# -- dtypes, and whose backward it is ----------------------------------------------------------------------------------


class Seen(autograd.Function):
    """Notes the gradients that it gets."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    def forward(self, x):
        return x * 1

    def backward(self, gradient):
        self._seen.append((name_of(gradient.dtype), cast_tensor(gradient, "float32").asnumpy().tolist()))
        return gradient


def gradients_of(run, dtype, scale=2.0**16):
    """Return what a backward sees in a dtype, and what the parameter gets."""
    seen = []
    with automate(run):
        run.session(loss_scale=scale)
        layer = gluon.nn.Dense(1, in_units=2, use_bias=False)
        layer.initialize(mx.init.One())
        trainer = gluon.Trainer(layer.collect_params(), "sgd")
        with autograd.record():
            outputs = layer(mx.nd.ones((1, 2)) * 2.0**-9)
            loss = cast_tensor(Seen(seen)(cast_tensor(outputs, dtype)), "float32") * 2.0**-9
        loss.backward()
        weight = layer.weight.grad().asnumpy().tolist()
        del trainer
    return seen, weight


def test_a_backward_gets_gradients_of_bfloat16_without_the_scale_in_their_dtype(run):
    """MXNet's operators refuse float32 beside it; its range is that of float32."""
    seen, weight = gradients_of(run, "bfloat16")
    assert seen == [("bfloat16", [[2.0**-9]])]
    assert weight == [[2.0**-18] * 2]
    assert run.recorder.scaled == []


def test_a_backward_that_gets_float16_is_named_in_the_headline(run):
    """Without the scale its gradients would underflow, and MXNet's operators refuse float32 beside float16."""
    seen, weight = gradients_of(run, "float16", 2.0**10)
    assert seen == [("float16", [[2.0]])]
    assert weight == [[2.0**-18] * 2]
    (entry,) = run.recorder.scaled
    assert entry.startswith("Seen.backward, in float16 (test_gradients_seen.py:")


def test_a_backward_of_a_librarys_own_gets_what_mxnet_hands_it(run, monkeypatch):
    monkeypatch.setitem(Seen.backward.__globals__, "__name__", "mxnet.a_layer")
    seen, weight = gradients_of(run, "float32")
    assert seen == [("float32", [[2.0**7]])]
    assert weight == [[2.0**-18] * 2]


if __name__ == "__main__":
    for slow in (FunctionRecomputesSlowly, FunctionDifferentiatesSlowly):
        expected = slow().run()
        with automate(automatic := Run("mxnet", RunSettings(level="O0", device="cpu"))):
            automatic.session(loss_scale=1024.0)
            assert slow().run() == expected
