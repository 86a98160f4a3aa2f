"""Two processes, each with a simulated GPU, train under `paddle.DataParallel` at every level; the tests judge.

What is right comes from plain Paddle in float32, in one process on the whole batch: no ampx, no processes, no scaling.
"""

import contextlib
import json
import pathlib
import socket

import numpy as np
import paddle
import pytest

import processes
import simulated_paddle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_paddle.started(), reason="there is no simulated GPU for paddle"),
]
WORKER = pathlib.Path(__file__).with_name("levels_worker.py")
CASES = {"O0-float32": ("O0", "float32")} | {
    f"{level}-{dtype}": (level, dtype) for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")
}
# LossScale(growth_interval=2), overflow in step 1: (applied, scale, next_scale, weights untouched) by step.
SKIPS_STEP_1 = [
    [True, 65536.0, 65536.0, False],
    [False, 65536.0, 32768.0, True],
    [True, 32768.0, 32768.0, False],
    [True, 32768.0, 65536.0, False],
]
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        endpoints = [f"127.0.0.1:{opened.getsockname()[1]}" for opened in sockets]
    common = {
        "PADDLE_DISTRI_BACKEND": "xccl",  # the collective functions of the device
        "FLAGS_selected_gpus": "0",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": endpoints[0],
    }
    ranks = [
        processes.Started(
            [WORKER, rank, folder, simulated_paddle.built_in],
            fresh=True,  # Paddle looks for devices when it is imported
            PADDLE_TRAINER_ID=str(rank),
            PADDLE_CURRENT_ENDPOINT=endpoints[rank],
            **common,
        )
        for rank in range(2)
    ]
    ended = processes.finish(ranks)  # what came before a hang still counts

    def read(case):
        rows = []
        for rank in range(2):
            path = folder / f"{case}.{rank}.json"
            assert path.exists(), f"rank {rank} wrote nothing:\n{ended[rank].stderr[-3000:]}"
            rows.append(json.loads(path.read_text()))
            assert "error" not in rows[-1], rows[-1]["error"]
        return rows

    return read


@pytest.fixture(scope="module")
def expected():
    before = paddle.get_device()
    paddle.set_device("cpu")
    yield train_plainly()
    paddle.set_device(before)


def train_plainly():
    """Train on the whole batch in float32, without the step that is to be skipped; return the flat weights."""
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.LayerNorm(4), paddle.nn.Linear(4, 2))
    for parameter in model.parameters():
        count = int(parameter.size)
        parameter.set_value((np.arange(count, dtype="float32").reshape(parameter.shape) % 5 - 2) / 4)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for step in (0, 2, 3):
        whole = np.random.default_rng(step).normal(size=(4, 4)).astype("float32")
        model(paddle.to_tensor(whole)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return np.concatenate([parameter.numpy().ravel() for parameter in model.parameters()])


@pytest.mark.parametrize("case", CASES)
def test_an_overflow_on_one_rank_is_skipped_on_both(records, expected, case, covers):
    level, dtype = CASES[case]
    first, second = records(case)
    assert first["steps"] == second["steps"] == SKIPS_STEP_1
    assert first["devices"] == ["Place(gpu:0)"]
    low = {"O2": [dtype] * 2 + ["float32"] * 2 + [dtype] * 2, "O3": [dtype] * 6}
    assert first["dtypes"] == low.get(level, ["float32"] * 6)
    assert first["weights"] == second["weights"]
    # The weights are rounded once at first and after each of three steps, and the gradients, a tenth of which is
    # added, in each of them; all are of the size of 1 at most.
    assert np.abs(np.array(first["weights"]) - expected).max() <= 4 * EPSILON[dtype]
    covers("distributed", "paddle", f"gpu/{dtype}/{level}")
