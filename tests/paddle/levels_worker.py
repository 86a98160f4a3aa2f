"""One of two processes, each with a simulated GPU: trains at every level, for test_distributed_levels.py to judge."""

import json
import math
import pathlib
import sys
import traceback

import simulated_paddle

folder, built = map(pathlib.Path, sys.argv[2:4])
simulated_paddle.start(built)

import numpy as np  # noqa: E402 -- after the device, which Paddle looks for when it is imported
import paddle  # noqa: E402

import ampx  # noqa: E402

OVERFLOWS = 1  # the step in which the loss of rank 0 is infinite


def batch(step, rank):
    """Return one rank's half of the global batch of a step."""
    whole = np.random.default_rng(step).normal(size=(4, 4)).astype("float32")
    return paddle.to_tensor(whole[2 * rank : 2 * rank + 2])


def train(rank, level, dtype):
    paddle.seed(rank)  # DataParallel gives all ranks the weights of rank 0
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.LayerNorm(4), paddle.nn.Linear(4, 2))
    for parameter in model.parameters():
        count = int(parameter.size)
        parameter.set_value((np.arange(count, dtype="float32").reshape(parameter.shape) % 5 - 2) / 4 * (1 - rank))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    options = {} if level == "O0" else {"dtype": dtype}
    with ampx.init(
        "paddle", level=level, device="gpu", loss_scale=ampx.LossScale(growth_interval=2), nan_loss="skip", **options
    ) as amp:
        if level in ("O2", "O3"):
            model, optimizer = amp.prepare(model, optimizer)
        optimizer = amp.wrap_optimizer(optimizer)
        parallel = paddle.DataParallel(model)
        steps = []
        for step in range(4):
            before = [parameter.numpy().tobytes() for parameter in model.parameters()]
            loss = parallel(batch(step, rank)).astype("float32").square().mean()
            with amp.scale_loss(loss * (math.inf if (step, rank) == (OVERFLOWS, 0) else 1.0), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.clear_grad()
            untouched = before == [parameter.numpy().tobytes() for parameter in model.parameters()]
            last = optimizer.last_step
            steps.append([last.applied, last.scale, last.next_scale, untouched])
    return {
        "steps": steps,
        "devices": sorted({str(parameter.place) for parameter in model.parameters()}),
        "dtypes": [str(parameter.dtype).removeprefix("paddle.") for parameter in model.parameters()],
        "weights": [number for p in model.parameters() for number in p.astype("float32").numpy().ravel().tolist()],
    }


def main():
    rank = int(sys.argv[1])
    paddle.distributed.init_parallel_env()
    for name, (level, dtype) in json.loads((folder / "cases.json").read_text()).items():
        try:
            record = train(rank, level, dtype)
        except Exception:
            record = {"error": traceback.format_exc()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
