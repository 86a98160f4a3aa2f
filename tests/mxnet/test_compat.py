"""MXNet can be imported where NumPy lacks names that it uses, and not where it would fail later."""

import subprocess
import sys

import numpy as np
import pytest

from ampx.errors import BackendLoadError
from ampx_mxnet import compat


@pytest.mark.parametrize("name", compat.REMOVED)
def test_missing_names_are_python_s_own(monkeypatch, name):
    monkeypatch.delattr(np, name, raising=False)
    assert name not in vars(np)
    compat.restore_names()
    assert vars(np)[name] is {"bool": bool, "int": int}[name]


def test_names_that_are_there_stay(monkeypatch):
    marker = object()
    monkeypatch.setattr(np, "bool", marker, raising=False)
    compat.restore_names()
    assert np.bool is marker


def test_nothing_else_of_numpy_changes():
    """In a fresh process, NumPy before and after importing MXNet through the backend."""
    script = (
        "import numpy as np\nbefore = dict(vars(np))\nfrom ampx_mxnet.compat import mx\n"
        "after = {name: value for name, value in vars(np).items() if isinstance(value, type)}\n"
        "print(sorted(name for name in after if after[name] is not before.get(name)))\n"
        "assert mx.nd.ones((1,)).asscalar() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == sorted(compat.REMOVED)


def test_numpy_2_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(np, "__version__", "2.1.0")
    with pytest.raises(BackendLoadError, match=r"numpy 2\.1\.0.*accepted: numpy older than 2.*pip install"):
        compat.restore_names()
