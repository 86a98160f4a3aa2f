"""Every test starts without a session and leaves none."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

import ampx
from ampx_mxnet.compat import mx


@pytest.fixture(autouse=True)
def _no_session():
    mx.random.seed(0)
    np.random.seed(0)
    ampx.shutdown()
    yield
    ampx.shutdown()


@pytest.fixture
def amp():
    """A session that scales losses dynamically and casts nothing."""
    return ampx.init("mxnet", level="O0", loss_scale="dynamic")


@pytest.fixture
def array():
    """Make an array of chosen numbers; nd.array would warn of SciPy."""

    def make(values, ctx=None, dtype="float32"):
        values = np.asarray(values, dtype)
        made = mx.nd.empty(values.shape, ctx=ctx or mx.cpu(), dtype=dtype)
        made[:] = values
        return made

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
def native():
    """Run a script of plain MXNet in a process of its own: what it does to itself stays there."""

    def run(script, *, timeout=120):
        head = "import numpy as np\nfrom ampx_mxnet.compat import amp, mx\nfrom mxnet import autograd, gluon, nd\n"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", head + script],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        return done.returncode, done.stdout, done.stderr

    return run
