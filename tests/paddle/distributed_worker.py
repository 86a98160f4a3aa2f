"""One of two gloo processes: trains under DataParallel (or fleet) and writes what it saw."""

import json
import math
import pathlib
import sys
import warnings

warnings.simplefilter("ignore")

import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402

import ampx  # noqa: E402


def train(rank, distribute, make_scale, overflow_rank):
    """Four steps; in the second, one rank's loss overflows. Each rank sees its own half of the batch."""
    paddle.seed(0)
    net = paddle.nn.Linear(3, 1)
    net.weight.set_value(paddle.to_tensor([[0.5], [-0.25], [1.0]]))
    net.bias.set_value(paddle.to_tensor([0.125]))
    raw = paddle.optimizer.Momentum(0.25, parameters=net.parameters())
    model, opt, stepped = distribute(net, raw, make_scale)
    seen = []
    for step in range(4):
        x = paddle.to_tensor([[1.0, 2.0, 0.5], [0.25, -1.0, 4.0]])[rank : rank + 1] * (step + 1.0)
        loss = (model(x) - 1.0).square().mean() * (math.inf if step == 1 and rank == overflow_rank else 1.0)
        before = net.weight.numpy().copy()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        stepped.step()
        stepped.clear_grad()
        result = opt.last_step
        untouched = bool((net.weight.numpy() == before).all())
        seen.append([result.applied, result.scale, result.next_scale, untouched])
    return {"steps": seen, "weight": net.weight.numpy().ravel().tolist()}


def data_parallel(net, raw, loss_scale):
    opt = ampx.wrap_optimizer(raw, loss_scale=loss_scale)
    return paddle.DataParallel(net), opt, opt


def fleet(net, raw, loss_scale):
    """Wrap first: fleet's optimizer adds up the gradients of the ranks, then steps the wrapped one, which checks."""
    opt = ampx.wrap_optimizer(raw, loss_scale=loss_scale)
    return dist.fleet.distributed_model(net), opt, dist.fleet.distributed_optimizer(opt)


def raw_optimizer():
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 1))
    return paddle.optimizer.AdamW(0.1, parameters=model.parameters())


def refusal(call):
    try:
        call()
    except ampx.AmpxError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main():
    rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    dist.init_parallel_env()
    ampx.init("paddle", level="O0", loss_scale="dynamic", nan_loss="skip")
    scale = ampx.LossScale(growth_interval=2)
    seen = {
        "data_parallel": train(rank, data_parallel, scale, overflow_rank=1),
        "data_parallel_0": train(rank, data_parallel, scale, overflow_rank=0),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    strategy = dist.fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 1, "pp_degree": 1}
    dist.fleet.init(is_collective=True, strategy=strategy)
    seen["fleet"] = train(rank, fleet, scale, overflow_rank=1)
    seen["wrong_order"] = refusal(lambda: ampx.wrap_optimizer(dist.fleet.distributed_optimizer(raw_optimizer())))
    seen["sharded_first"] = refusal(lambda: ampx.wrap_optimizer(dist.shard_optimizer(raw_optimizer())))
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    # What fleet does to an optimizer with sharding_degree=2, which it cannot be initialised with a second time.
    opt = ampx.wrap_optimizer(raw_optimizer())
    seen["sharded_after"] = refusal(lambda: setattr(opt, "_parameter_list", opt._parameter_list[:2]))
    seen["sharded_update"] = refusal(lambda: opt._apply_optimize(None, None, []))
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
