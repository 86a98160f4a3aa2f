"""Every test starts without a session and leaves none; torch computes on one thread, so that sums are the same."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import torch

import ampx


@pytest.fixture(autouse=True)
def _no_session():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ampx.shutdown()
    yield
    ampx.shutdown()


@pytest.fixture
def amp():
    """A session that scales losses dynamically and casts nothing by itself, cheap on any CPU.

    A loss that is NaN is an overflow like any other here: tests provoke overflows with infinite inputs.
    """
    return ampx.init("torch", dtype="bfloat16", loss_scale="dynamic", process_wide=False, nan_loss="skip")


@pytest.fixture
def backward():
    """Scale a loss and run its backward."""

    def run(loss, opt, **options):
        with ampx.scale_loss(loss, opt, **options) as scaled:
            scaled.backward()

    return run


@pytest.fixture
def same():
    """Compare two trees of tensors bit for bit."""

    def compare(left, right):
        if isinstance(left, torch.Tensor):
            left, right = (
                tensor.to_dense() if tensor.layout is not torch.strided else tensor for tensor in (left, right)
            )
            return left.dtype == right.dtype and torch.equal(left, right)
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(compare(left[key], right[key]) for key in left)
        if isinstance(left, (list, tuple)):
            return len(left) == len(right) and all(map(compare, left, right))
        return left == right

    return compare


@pytest.fixture(scope="session")
def run_two_ranks():
    """Run a worker as two gloo processes on this machine; what they leave in the folder is for the tests to judge."""

    def run(worker, folder, seconds=150):
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in ("0", "1"):
                log = stack.enter_context((folder / f"stderr.{rank}").open("w"))
                command = [sys.executable, str(worker), rank, str(folder)]
                started = subprocess.Popen(command, env=environment, stderr=log)
                stack.callback(started.wait)
                stack.callback(started.kill)
                ranks.append(started)
            deadline = time.monotonic() + seconds
            with contextlib.suppress(subprocess.TimeoutExpired):  # the scenarios before the one that hangs still count
                for started in ranks:
                    started.wait(max(0.0, deadline - time.monotonic()))

    return run
