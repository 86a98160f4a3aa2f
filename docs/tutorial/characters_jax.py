"""Train a network in JAX to guess the next character of a text; nothing here knows of mixed precision."""

import argparse
import itertools
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--width", type=int, default=2048)
options = parser.parse_args()

text = "".join(pydoc_data.topics.topics.values())  # the language reference, which comes with Python
alphabet = sorted(set(text))
characters = np.searchsorted(alphabet, list(text))
context = 64
random = np.random.default_rng(0)
sizes = [context * 32, options.width, options.width, len(alphabet)]


def normal(rows, columns, deviation):
    return jnp.asarray(deviation * random.normal(size=(rows, columns)), jnp.float32)


embedding = normal(len(alphabet), 32, 1.0)
weights = [normal(rows, columns, (2 / rows) ** 0.5) for rows, columns in itertools.pairwise(sizes)]
params = {
    "embedding": embedding,
    "layers": [{"weight": weight, "bias": jnp.zeros(weight.shape[1])} for weight in weights],
}


def predict(params, inputs):
    *hidden, last = params["layers"]
    values = params["embedding"][inputs].reshape(len(inputs), -1)
    for layer in hidden:
        values = jax.nn.relu(values @ layer["weight"] + layer["bias"])
    return values @ last["weight"] + last["bias"]


tx = optax.adam(1e-3)
opt_state = tx.init(params)


@jax.jit
def train_step(params, opt_state, inputs, targets):
    def loss_of(params):
        return optax.softmax_cross_entropy_with_integer_labels(predict(params, inputs), targets).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for step in range(options.steps):
    starts = random.integers(len(characters) - context, size=options.batch_size)
    windows = characters[starts[:, None] + np.arange(context + 1)]
    params, opt_state, loss = train_step(params, opt_state, windows[:, :-1], windows[:, -1])
    if step % 10 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss:.3f}", flush=True)
