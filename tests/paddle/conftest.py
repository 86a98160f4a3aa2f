"""Every test starts without a session and leaves none."""

import functools
import importlib
import warnings

import pytest

import processes

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "No ccache found", UserWarning)  # paddle says so on import
    paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

import ampx


@pytest.fixture(autouse=True)
def _no_session():
    paddle.seed(0)
    ampx.shutdown()
    yield
    ampx.shutdown()
    paddle.disable_static()


@pytest.fixture
def amp():
    """A session that scales losses dynamically; a loss that is NaN is an overflow like any other."""
    return ampx.init("paddle", level="O0", loss_scale="dynamic", nan_loss="skip")


@pytest.fixture
def backward():
    """Scale a loss and run its backward."""

    def run(loss, opt, **options):
        with ampx.scale_loss(loss, opt, **options) as scaled:
            scaled.backward()

    return run


@pytest.fixture
def weights():
    """Make a parameter vector with given values."""

    def make(*values):
        initial = paddle.nn.initializer.Assign(list(values))
        return paddle.create_parameter([len(values)], "float32", default_initializer=initial)

    return make


@pytest.fixture
def native():
    """Run a script of plain Paddle in a process of its own: what it does to itself stays there."""

    return processes.native("import warnings\nwarnings.simplefilter('ignore')\nimport numpy as np\nimport paddle\n")


@functools.cache
def _static_dtype():
    from ampx_paddle import devices

    paddle.enable_static()
    try:
        return devices.describe("cpu").preferred or "float32"
    finally:
        paddle.disable_static()


def pytest_runtest_setup(item):
    if item.get_closest_marker("bfloat16") and _static_dtype() != "bfloat16":
        pytest.skip("Paddle's static graphs compute no bfloat16 on this CPU")


@pytest.fixture
def static_dtype():
    """The dtype of static graphs on this CPU. test_static.py compares what the device says with what Paddle does."""
    return _static_dtype()


@pytest.fixture
def fluid(static_dtype):
    """The alias of `paddle.fluid` as a script sees it, with empty programs of its own."""
    import ampx_paddle.fluid

    ampx_paddle.fluid.install(static_dtype)
    alias = importlib.import_module("paddle.fluid")
    with alias.program_guard(alias.Program(), alias.Program()), alias.scope_guard(alias.Scope()):
        yield alias
    ampx.shutdown()
    ampx_paddle.fluid.uninstall()
