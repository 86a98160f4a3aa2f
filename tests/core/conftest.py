"""A framework in pure Python, small enough to see through, and a registry that holds nothing else."""

import contextlib
import math
import types

import pytest

import ampx
from ampx import plugins
from ampx.session import sessions

SUPPORTED = frozenset({"float16", "bfloat16"})


class Param:
    def __init__(self, value):
        self.value = value
        self.grad = None


class Loss:
    """A loss that knows which gradient its backward adds to which parameter."""

    def __init__(self, *terms, value=1.0, factor=1.0, dtype="float16", elements=1, attached=True):
        self.terms, self.value, self.factor = terms, value, factor
        self.dtype, self.elements, self.attached = dtype, elements, attached

    def backward(self):
        for param, gradient in self.terms:
            param.grad = (param.grad or 0.0) + gradient * self.factor


class Sgd:
    def __init__(self, *params, lr=1.0):
        self.params, self.lr, self.updates = list(params), lr, 0

    def update(self, grads=None):
        self.updates += 1
        for param, grad in zip(self.params, grads or [param.grad for param in self.params], strict=True):
            param.value -= self.lr * (grad or 0.0)


class FakeBackend(ampx.GenericBackend):
    name = "alpha"
    framework = None  # a Framework: where casting stands, and what was asked
    capabilities = ampx.Capabilities(
        devices=("cpu", "chip"),
        dtypes=SUPPORTED,
        levels=frozenset({"O0", "O1"}),
        autocast="scoped",
        op_lists=True,
        clipping=True,
        per_loss_scales=True,
    )

    def device(self, name):
        if name not in ("auto", "cpu", "chip", "slow", "old"):
            raise ampx.UnsupportedDeviceError(f"device={name!r}; accepted: cpu, chip. Pass one.")
        if name == "slow":
            return ampx.Device("slow", frozenset(), frozenset({"bfloat16"}), None, "it has no hardware for it")
        if name == "old":
            return ampx.Device("old", frozenset(), frozenset(), None, "it has no hardware for it")
        if name == "chip":
            return ampx.Device("chip", frozenset({"bfloat16"}), frozenset(), "bfloat16", "it has the hardware")
        return ampx.Device("cpu", SUPPORTED, frozenset(), "float16", "it has the hardware")

    def is_optimizer(self, candidate):
        return type(candidate) is self.framework.Sgd

    @contextlib.contextmanager
    def autocast(self, plan, enabled):
        framework = self.framework
        before, framework.casting = framework.casting, plan.dtype if enabled else None
        framework.plans.append(plan)
        try:
            yield
        finally:
            framework.casting = before

    def activate(self, plan):
        if self.framework.refuses_activation:
            raise RuntimeError("the framework said no")
        self.framework.casting = plan.dtype

    def deactivate(self, plan):
        self.framework.casting = None

    def check_plan(self, plan):
        if "nonsense" in (*plan.allow, *plan.deny):
            raise ampx.UnsupportedOpError("no op 'nonsense'; accepted: ops. Remove it.")
        return plan

    def cast(self, tree, dtype):
        if isinstance(tree, tuple):
            return tuple(self.cast(item, dtype) for item in tree)
        if isinstance(tree, dict):
            return {key: self.cast(value, dtype) for key, value in tree.items()}
        return f"{tree}:{dtype}" if isinstance(tree, str) else tree

    def widest(self, tree, at_least):
        return "float32" if "float32" in repr(tree) else at_least

    def inspect_loss(self, loss, check_nan):
        if not isinstance(loss, self.framework.Loss):
            raise ampx.LossDtypeError(f"scale_loss got {type(loss).__name__}; accepted: a Loss. Pass one.")
        nan = loss.value != loss.value if check_nan or check_nan is None else None
        return ampx.LossInfo(loss.elements, loss.dtype, loss.dtype.startswith(("f", "b")), loss.attached, nan)

    def scale(self, loss, scale):
        if loss.value == "broken":
            raise RuntimeError("scaling failed")
        return type(loss)(*loss.terms, value=loss.value, factor=loss.factor * scale, dtype="float32")

    def gradients(self, optimizer):
        return [param for param in optimizer.params if param.grad is not None]

    def zero_gradients(self, optimizer):
        for param in optimizer.params:
            param.grad = None

    def unscale(self, grads, scale):
        if self.capabilities.gradients == "explicit":
            return ampx.Unscaled([grad / scale for grad in grads], all(map(math.isfinite, grads)))
        for param in grads:
            param.grad /= scale
        return ampx.Unscaled(grads, all(math.isfinite(param.grad) for param in grads))

    def clip(self, grads, max_norm, max_value):
        for param in grads:
            param.grad = param.grad if max_value is None else max(-max_value, min(max_value, param.grad))
        norm = math.hypot(*(param.grad for param in grads))
        if max_norm is None:
            return grads, None
        for param in grads:
            param.grad *= min(1.0, max_norm / norm) if norm else 1.0
        return grads, norm

    def apply(self, optimizer, grads):
        if self.framework.fails_to_apply:
            raise RuntimeError("the framework failed")
        optimizer.update(grads if self.capabilities.gradients == "explicit" else None)


class Framework:
    """One pretended framework; its classes claim to live in a module of its name."""

    def __init__(self, name, **capabilities):
        self.name = name
        self.casting = None
        self.refuses_activation = self.fails_to_apply = False
        self.plans = []
        for cls in (Param, Loss, Sgd):
            setattr(self, cls.__name__, type(cls.__name__, (cls,), {"__module__": f"{name}.core"}))
        abilities = {**vars(FakeBackend.capabilities), **capabilities}
        members = {"name": name, "framework": self, "capabilities": ampx.Capabilities(**abilities)}
        self.Backend = type("Backend", (FakeBackend,), members)
        self.plugin = types.ModuleType(f"ampx_{name}")

        def ampx_register_backends(register):
            register(name, self.Backend, roots=(name,), requires=f"{name}>=1")

        self.plugin.ampx_register_backends = ampx.hookimpl(ampx_register_backends)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    monkeypatch.delenv("AMPX_DISABLE_PLUGINS", raising=False)
    monkeypatch.setattr(plugins, "_default", [plugins.Registry(entry_points=[])])
    monkeypatch.setattr(sessions, "_active", {})


@pytest.fixture
def make_framework():
    def make(name="alpha", **capabilities):
        framework = Framework(name, **capabilities)
        ampx.register_plugin(framework.plugin)
        return framework

    return make


@pytest.fixture
def alpha(make_framework):
    return make_framework("alpha")


@pytest.fixture
def beta(make_framework):
    return make_framework("beta")


class Trainer:
    """One parameter, one optimizer, and steps with chosen true gradients."""

    def __init__(self, framework, **options):
        self.framework = framework
        self.param = framework.Param(0.0)
        self.raw = framework.Sgd(self.param)
        self.opt = ampx.wrap_optimizer(self.raw, **options)

    def backward(self, gradient=1.0, **options):
        with ampx.scale_loss(self.framework.Loss((self.param, gradient)), self.opt, **options) as scaled:
            scaled.backward()

    def step(self, gradient=1.0):
        self.backward(gradient)
        self.opt.step()
        self.opt.zero_grad()
        return self.opt.last_step


@pytest.fixture
def make_trainer():
    return Trainer
