"""A Ctrl-C at any line of ampx while functions are cast; interrupted steps are in tests/conformance/test_mxnet.py."""

import os

import pytest

import ampx
from ampx.session import sessions
from ampx_mxnet.compat import amp as native_amp, mx
from ampx_mxnet.dtypes import name_of
from interruptions import interrupted_everywhere

PACKAGES = ("ampx", "ampx_mxnet")
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))  # more of the lines


def _compute_dtype():
    ones = mx.nd.ones((2, 2))
    return name_of(mx.nd.FullyConnected(ones, ones, num_hidden=2, no_bias=True).dtype)


def _inside(enabled):
    with ampx.autocast(enabled=enabled):
        pass


@pytest.mark.bfloat16
def test_a_new_session_casts_where_a_region_was_never_left():
    """So it lives on in the traceback of an exception, which Python's prompt keeps."""
    left_open = ampx.init("mxnet", dtype="bfloat16", device="cpu").autocast(enabled=False)
    left_open.__enter__()
    assert _compute_dtype() == "float32"
    ampx.init("mxnet", dtype="bfloat16", device="cpu")
    assert _compute_dtype() == "bfloat16"
    left_open.__exit__(None, None, None)
    assert _compute_dtype() == "bfloat16"


def _start(process_wide=True):
    return ampx.init("mxnet", dtype="bfloat16", device="cpu", process_wide=process_wide)


@pytest.mark.bfloat16
@pytest.mark.parametrize(
    ("process_wide", "act"), [(True, lambda _: _start()), (False, lambda _: _inside(True))], ids=["init", "region"]
)
def test_functions_are_cast_as_long_as_somebody_needs_it_after_an_interruption(process_wide, act):
    """While they are put in place or taken away, which takes thousands of lines, of which some are interrupted."""
    original = mx.nd.FullyConnected
    expected = "bfloat16" if process_wide else "float32"
    for _, place in interrupted_everywhere(lambda: _start(process_wide), act, PACKAGES, stride=97 if THOROUGH else 997):
        if sessions.get("mxnet") is not None:
            assert _compute_dtype() == expected, place
            _inside(True)
            assert _compute_dtype() == expected, place
            assert (mx.nd.FullyConnected is original) is not process_wide, place
        ampx.shutdown()
        assert mx.nd.FullyConnected is original, place
        assert not native_amp.amp._amp_initialized, place
