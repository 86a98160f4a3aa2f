"""One of two workers of a store on this machine: trains by kvstore='dist_sync' and writes what it saw.

Importing MXNet in the scheduler or the server serves until the workers are gone, and ends the process.
"""

import json
import math
import os
import pathlib
import sys
import warnings

warnings.simplefilter("ignore")

import simulated_mxnet  # noqa: E402

if os.environ.get("AMPX_SIMULATE_CUDA"):
    simulated_mxnet.start()

import ampx  # noqa: E402
from ampx_mxnet.compat import mx  # noqa: E402

RATE = 0.125


class Training:
    """A parameter that every worker trains; its gradient is what the losses say.

    MXNet's stores know parameters by their number in a trainer, so that there can be one trainer only.
    """

    def __init__(self, store, parameter):
        self.rank, self.parameter = store.rank, parameter
        # MXNet's own choice would be to update in the store, before anything is checked.
        raw = mx.gluon.Trainer([self.parameter], "sgd", {"learning_rate": RATE}, kvstore=store)
        self.opt = ampx.wrap_optimizer(raw)

    def loss(self, slope):
        return (self.parameter.data() * slope).sum()

    def backward(self, slope, loss_id=0):
        with mx.autograd.record():
            loss = self.loss(slope)
            with ampx.scale_loss(loss, self.opt, loss_id=loss_id) as scaled:
                scaled.backward()

    def step(self):
        """Step; return whether it was applied, by how much the weights went down, and the loss scales after it."""
        before = self.parameter.data().astype("float32").asnumpy().ravel()
        self.opt.step(1)
        after = self.parameter.data().astype("float32").asnumpy().ravel()
        self.opt.zero_grad()
        scales = [state.scale for _, state in sorted(self.opt.ampx_group.states.items())]
        return self.opt.last_step.applied, ((before - after) / RATE).tolist(), scales


def steps(training):
    """Three steps; in the second, one worker's loss overflows."""
    seen = []
    for step in range(3):
        training.backward(math.inf if step == 1 and training.rank == 1 else training.rank + 1.0)
        seen.append(training.step())
    return seen


def unscaled(training):
    """What is asked for before the step is of the workers' sum."""
    training.backward(training.rank + 1.0)
    ampx.unscale(training.opt)
    gradient = training.parameter.grad().asnumpy().tolist()
    norm = ampx.clip_grad_norm(training.opt, 100.0).item()
    return [gradient, norm, training.step()]


def by_hand(training):
    """`allreduce_grads` and `update` are a step; another backward may not come between them."""
    training.backward(training.rank + 1.0)
    training.opt.allreduce_grads()
    message = ""
    try:
        training.backward(1.0)
    except ampx.ProtocolError as error:
        message = str(error)
    return [message, training.step()]


def sum_overflows(training):
    """Each worker's gradients are finite, their sum is not."""
    training.backward(2.0**127 / training.opt.loss_scale)
    return training.step()


def losses(training):
    """Two losses with scales of their own; in the second step one of one worker overflows."""
    seen = []
    for step in range(3):
        for loss_id in (0, 1):
            overflows = (step, loss_id, training.rank) == (1, 1, 1)
            training.backward(math.inf if overflows else training.rank + 1.0, loss_id)
        seen.append(training.step())
    return seen


SCENARIOS = (steps, unscaled, by_hand, sum_overflows, losses)


class TrainingOnGpu(Training):
    """A layer on a GPU that every worker trains at a level; its input is the slope."""

    def __init__(self, store, level):
        self.layer = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
        self.layer.initialize(mx.init.Zero(), ctx=mx.gpu(0))
        super().__init__(store, self.layer.weight)
        if level in ("O2", "O3"):
            ampx.prepare(self.layer, self.opt)

    def loss(self, slope):
        return self.layer(mx.nd.full((1, 2), slope, ctx=mx.gpu(0))).astype("float32").sum()


def products(training):
    """As `steps`, in products."""
    return steps(training)


def main(folder, level=None):
    store = mx.kv.create("dist_sync")
    if level is None:
        ampx.init("mxnet", level="O0", loss_scale="dynamic", nan_loss="skip")
        parameter = mx.gluon.Parameter("w", shape=(2,), grad_req="add")
        parameter.initialize(mx.init.Zero())
        training, scenarios = Training(store, parameter), SCENARIOS
    else:
        dtype = {} if level == "O0" else {"dtype": "float16"}
        scale = ampx.LossScale(init_scale=2.0**10)
        ampx.init("mxnet", device="gpu", level=level, loss_scale=scale, nan_loss="skip", **dtype)
        training, scenarios = TrainingOnGpu(store, level), [products]
    seen = {}
    for scenario in scenarios:
        seen[scenario.__name__] = scenario(training)
        pathlib.Path(folder, f"{store.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
