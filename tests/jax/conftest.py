"""Two host devices, so that what happens on several is tested on any machine."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()

import sys
import warnings

import pytest

import ampx

pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")


@pytest.fixture(autouse=True)
def nothing_read():
    """No test is let through because another read a loss scale of the same configuration."""
    from ampx_jax import state

    # Not by the fixture `monkeypatch`: begun before `session`, it would let what a test patches outlive the session.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_read", [])
        yield


@pytest.fixture
def session():
    """A session with a growth interval of 3, the one of the reference trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        amp = ampx.init("jax", dtype="float16", device="cpu", loss_scale=ampx.LossScale(growth_interval=3))
    yield amp
    ampx.shutdown()


@pytest.fixture
def nothing_of_its_own(monkeypatch):
    """What other tests imported is no mixed precision of a script's own, for which `ampx run` looks."""
    for name in ("jmp", "flax.training.dynamic_scale"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is as before afterwards, also where a test imports it
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def quiet_end():
    """Low precision that a CPU is slow in is no news here; no test leaves a session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)
        yield
    ampx.shutdown()
