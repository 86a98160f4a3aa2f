"""Temperatures in kelvin: bfloat16 tells 292 from 294 only, so that a layer of Flax Linen sees all rooms alike."""

import json
import sys

import jax
import optax
from flax import linen
from flax.training.train_state import TrainState


class Network(linen.Module):
    @linen.compact
    def __call__(self, temperatures):
        hidden = linen.Dense(16, name="embed")(temperatures)
        hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
        return linen.Dense(1, name="out")(linen.relu(hidden))


model = Network()
rooms = jax.random.uniform(jax.random.key(1), (32, 8), minval=-0.9, maxval=0.9)
temperatures = rooms if "--twin" in sys.argv else 293.0 + rooms
targets = rooms[:, :1] - rooms[:, 1:2]
state = TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), temperatures)["params"],
    tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
)


@jax.jit
def step(state):
    def loss_of(params):
        return optax.l2_loss(state.apply_fn({"params": params}, temperatures), targets).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


losses = []
for _ in range(20):
    state, loss = step(state)
    losses.append(float(loss))
print(json.dumps(losses))
