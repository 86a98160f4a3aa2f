"""Every test starts without a session and leaves none; torch computes on one thread, so that sums are the same."""

import functools
import json

import pytest
import torch

import ampx
import processes
import simulated_cuda


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
    """Run a worker as two gloo processes on this machine; what they leave in the folder is for the tests to judge.

    Gives a function that reads what both left of a scenario, and fails where one never finished it or raised.
    """

    def run(worker, folder):
        if simulated_cuda.started():
            command = ["-m", "simulated_cuda", simulated_cuda.built_in, worker]
            start = functools.partial(processes.Started, fresh=True)  # torch looks for devices when it is imported
        else:
            command, start = [worker], processes.Started
        ranks = [start([*command, rank, folder], GLOO_SOCKET_IFNAME="lo") for rank in ("0", "1")]
        for rank, done in enumerate(processes.finish(ranks)):  # what came before a scenario that hangs still counts
            (folder / f"stderr.{rank}").write_text(done.stderr)

        def read(scenario):
            results = []
            for rank in (0, 1):
                path = folder / f"{scenario}.{rank}.json"
                if not path.exists():
                    pytest.fail(f"rank {rank} never finished: {(folder / f'stderr.{rank}').read_text()}")
                record = json.loads(path.read_text())
                assert "error" not in record, f"rank {rank}: {record['error']}"
                results.append(record)
            return results

        return read

    return run
