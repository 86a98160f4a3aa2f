"""R2D2 learns returns on a scale of roots: its inverse takes 1 from the root of 1.01, where float16 has no digits.

At an epsilon of 1e-3 the root of a value of 0.3 is 1.0026, and float16 has 1.002 and 1.003 only, so that all values
below 0.45 are returns of -0.05. The twin writes the same difference as a quotient.
"""

import json
import sys

import mxnet as mx
from mxnet import autograd, gluon

EPSILON = 1e-3


def rescale(F, x):  # noqa: N803
    return F.sign(x) * (F.sqrt(F.abs(x) + 1) - 1) + EPSILON * x


class InverseRescale(gluon.HybridBlock):
    """From the scale that values are learned on to returns."""

    def hybrid_forward(self, F, x):  # noqa: N803
        inside = 4 * EPSILON * (F.abs(x) + (1 + EPSILON))
        if "--twin" in sys.argv:
            root = inside / (F.sqrt(inside + 1) + 1) / (2 * EPSILON)
        else:
            root = (F.sqrt(1 + inside) - 1) / (2 * EPSILON)
        return F.sign(x) * (F.square(root) - 1)


def q_network(prefix):
    net = gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(gluon.nn.Dense(32, activation="tanh"), gluon.nn.Dense(4, weight_initializer=mx.init.Normal(0.01)))
    return net


class Agent(gluon.HybridBlock):
    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.online, self.target = q_network("online_"), q_network("target_")
            self.inverse = InverseRescale(prefix="inverse_")

    def hybrid_forward(self, F, state, action):  # noqa: N803
        return F.pick(self.online(state), action)

    def returns(self, reward, state):
        return rescale(mx.nd, reward + 0.99 * mx.nd.max(self.inverse(self.target(state)), axis=1))


mx.random.seed(0)
context = mx.gpu() if mx.context.num_gpus() else mx.cpu()
agent = Agent(prefix="agent_")
agent.initialize(mx.init.Xavier(), ctx=context)
agent.target[1].bias.set_data(mx.nd.array([0.2, 0.3, 0.25, 0.3]))
states, following = mx.nd.random.normal(shape=(2, 32, 8), ctx=context)
actions, rewards = mx.nd.arange(32, ctx=context) % 4, mx.nd.arange(32, ctx=context) == 5
trainer = gluon.Trainer(agent.online.collect_params(), "adam", {"learning_rate": 2e-2})
losses = []
for _ in range(16):
    targets = agent.returns(rewards, following)
    with autograd.record():
        loss = mx.nd.mean(mx.nd.square(agent(states, actions) - targets))
    loss.backward()
    trainer.step(1)
    losses.append(float(loss.asscalar()))
print(json.dumps(losses))
