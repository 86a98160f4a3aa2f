"""Two gloo processes on this machine run distributed_worker.py once; the tests judge what they wrote.

What is right comes from plain Paddle in one process on the whole batch: no ampx, no distribution, no scaling.
"""

import contextlib
import json
import pathlib
import socket

import numpy as np
import paddle
import pytest

import processes

pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")
SECONDS = 120
# LossScale(growth_interval=2), overflow in the second step: (applied, scale, next_scale, weights untouched) by step.
EXPECTED = [
    [True, 65536.0, 65536.0, False],
    [False, 65536.0, 32768.0, True],
    [True, 32768.0, 32768.0, False],
    [True, 32768.0, 65536.0, False],
]


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    (master,) = free_ports(1)
    common = {
        "GLOO_SOCKET_IFNAME": "lo",
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master),
    }
    ranks = [
        processes.Started(
            [WORKER, rank, folder], PADDLE_TRAINER_ID=str(rank), PADDLE_CURRENT_ENDPOINT=endpoints[rank], **common
        )
        for rank in range(2)
    ]
    ended = processes.finish(ranks, SECONDS)  # what came before a hang still counts

    def read(scenario):
        rows = []
        for rank in range(2):
            path = folder / f"{rank}.json"
            seen = json.loads(path.read_text()) if path.exists() else {}
            assert scenario in seen, f"rank {rank} wrote nothing:\n{ended[rank].stderr[-3000:]}"
            rows.append(seen[scenario])
        return rows

    return read


def plain_weights():
    """Train on the mean of both ranks' gradients, without the step that overflows."""
    net = paddle.nn.Linear(3, 1)
    net.weight.set_value(paddle.to_tensor([[0.5], [-0.25], [1.0]]))
    net.bias.set_value(paddle.to_tensor([0.125]))
    opt = paddle.optimizer.Momentum(0.25, parameters=net.parameters())
    for step in (0, 2, 3):
        x = paddle.to_tensor([[1.0, 2.0, 0.5], [0.25, -1.0, 4.0]]) * (step + 1.0)
        (net(x) - 1.0).square().mean().backward()
        opt.step()
        opt.clear_grad()
    return net.weight.numpy().ravel()


@pytest.mark.parametrize("scenario", ["data_parallel", "data_parallel_0", "fleet"])
def test_an_overflow_on_one_rank_makes_both_skip(records, scenario, covers):
    for record in records(scenario):
        assert record["steps"] == EXPECTED
        np.testing.assert_allclose(record["weight"], plain_weights(), rtol=1e-5)
    covers("distributed", "paddle", "cpu/float32/O0")


def test_what_fleet_gives_is_not_wrapped(records):
    """It may add up gradients inside its step, after they were checked; so the order is wrap first, then fleet."""
    for message in records("wrong_order"):
        assert "HybridParallelOptimizer" in message


@pytest.mark.parametrize("scenario", ["sharded_first", "sharded_after", "sharded_update"])
def test_sharding_is_refused_before_anything_is_trained(records, scenario):
    """A process would see the gradients of its shard only, and skip by itself."""
    for message in records(scenario):
        assert message.startswith("UnsupportedByBackendError")
        assert "sharding_degree=1" in message
