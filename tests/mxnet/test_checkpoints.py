"""A run that stops and goes on from its files is the run that never stopped."""

import json
import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import ampx
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE

# Overflows by step: some before the run stops, some after. The growth interval is 3.
PATTERN, REFERENCE = REFERENCE_PATTERN, list(REFERENCE_TRACE)


def loss_of(network, step):
    x = mx.nd.array([[math.sin(step), math.cos(step), 1.0]] * 2)
    return (network(x) ** 2).mean()


class Training:
    """A network, its trainer and session, as a script makes them when it starts."""

    def __init__(self, optimizer):
        self.amp = ampx.init("mxnet", level="O0", loss_scale=ampx.LossScale(growth_interval=3), nan_loss="skip")
        self.network = gluon.nn.Dense(1, in_units=3)
        self.network.initialize(mx.init.One())
        options = {"learning_rate": 0.01, **({"momentum": 0.9} if optimizer == "nag" else {})}
        raw = gluon.Trainer(self.network.collect_params(), optimizer, options)
        self.trainer = ampx.wrap_optimizer(raw)

    def run(self, steps):
        trace = []
        for step in steps:
            with autograd.record():
                loss = loss_of(self.network, step) * (math.inf if PATTERN[step] else 1.0)
                with ampx.scale_loss(loss, self.trainer) as scaled:
                    scaled.backward()
            self.trainer.step(1)
            trace.append(self.trainer.loss_scale)
        return trace

    def weights(self):
        return np.concatenate([value.data().asnumpy().ravel() for value in self.network.collect_params().values()])

    def save(self, folder):
        self.network.save_parameters(str(folder / "network"))
        self.trainer.save_states(str(folder / "trainer"))
        (folder / "amp.json").write_text(json.dumps(self.amp.state_dict()))

    def load(self, folder, with_json):
        self.network.load_parameters(str(folder / "network"))
        self.trainer.load_states(str(folder / "trainer"))
        if with_json:
            self.amp.load_state_dict(json.loads((folder / "amp.json").read_text()))


@pytest.mark.parametrize("optimizer", ["nag", "adam"])
@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize("with_json", [False, True])
def test_a_resumed_run_is_bit_identical(tmp_path, optimizer, stop, with_json):
    """Also where it stops right after a skip, or between two growths; the trainer's file holds the loss scale too."""
    whole = Training(optimizer)
    trace = whole.run(range(len(PATTERN)))
    assert trace == REFERENCE
    ampx.shutdown()

    first = Training(optimizer)
    first.run(range(stop))
    first.save(tmp_path)
    ampx.shutdown()
    del first

    second = Training(optimizer)
    second.load(tmp_path, with_json)
    assert second.run(range(stop, len(PATTERN))) == REFERENCE[stop:]
    np.testing.assert_array_equal(second.weights(), whole.weights())
    assert second.trainer.optimizer.num_update == whole.trainer.optimizer.num_update


def test_the_trainers_file_is_mxnets_own(tmp_path):
    """Plain MXNet goes on from it, with gradients that carry no scale."""
    saved = Training("nag")
    saved.run(range(5))  # the fourth is skipped
    saved.save(tmp_path)
    ampx.shutdown()

    loaded, oracle = (gluon.nn.Dense(1, in_units=3) for _ in range(2))
    oracle.initialize(mx.init.One())
    loaded.load_parameters(str(tmp_path / "network"))
    options = {"learning_rate": 0.01, "momentum": 0.9}
    trainers = {network: gluon.Trainer(network.collect_params(), "nag", options) for network in (loaded, oracle)}
    trainers[loaded].load_states(str(tmp_path / "trainer"))
    assert trainers[loaded].optimizer.rescale_grad == 1.0
    for network, steps in ((oracle, (0, 1, 2, 4, 5)), (loaded, (5,))):
        for step in steps:
            with autograd.record():
                loss = loss_of(network, step)
            loss.backward()
            trainers[network].step(1)
    np.testing.assert_array_equal(loaded.weight.data().asnumpy(), oracle.weight.data().asnumpy())
