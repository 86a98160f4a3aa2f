"""Every test starts without a session and leaves none."""

import functools
import importlib.util

import pytest

import processes

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

import ampx
from ampx_mxnet.compat import mx


@pytest.fixture(autouse=True)
def _no_session():
    mx.random.seed(0)
    ampx.shutdown()
    yield
    ampx.shutdown()


@functools.cache
def _dtypes():
    from ampx_mxnet import devices

    cpu = devices.describe("cpu")
    return cpu.native | cpu.emulated


def pytest_runtest_setup(item):
    if item.get_closest_marker("bfloat16") and "bfloat16" not in _dtypes():
        pytest.skip("MXNet computes no bfloat16 on this CPU")


@pytest.fixture
def amp():
    """A session that scales losses dynamically; a loss that is NaN is an overflow like any other."""
    return ampx.init("mxnet", level="O0", loss_scale="dynamic", nan_loss="skip")


@pytest.fixture
def weights():
    """Make a parameter vector with given values, on one or several contexts."""

    def make(*values, name="w", dtype="float32", ctx=None, grad_req="write"):
        parameter = mx.gluon.Parameter(name, shape=(len(values),), dtype=dtype, grad_req=grad_req)
        parameter.initialize(mx.init.Zero(), ctx=ctx)
        parameter.set_data(mx.nd.array(values, dtype=dtype))
        return parameter

    return make


@pytest.fixture
def dense():
    """Make a dense layer without bias whose weights are 1, on one context or several."""

    def make(inputs=2, ctx=None, grad_req="write"):
        net = mx.gluon.nn.Dense(1, in_units=inputs, use_bias=False)
        net.initialize(mx.init.One(), ctx=ctx or mx.cpu())
        net.collect_params().setattr("grad_req", grad_req)
        return net

    return make


@pytest.fixture
def backward():
    """Compute a loss, scale it and run its backward."""

    def run(compute, opt, **options):
        with mx.autograd.record():
            loss = compute()
            with ampx.scale_loss(loss, opt, **options) as scaled:
                mx.autograd.backward(scaled)

    return run


@pytest.fixture
def native():
    """Run a script of plain MXNet in a process of its own: what it does to itself stays there."""

    return processes.native(
        "import warnings\nwarnings.simplefilter('ignore')\nimport numpy as np\nfrom ampx_mxnet.compat import mx\n"
        "from mxnet import autograd, gluon, nd\nfrom mxnet.contrib import amp\n"
    )
