"""Train a network in JAX to read handwritten digits; nothing here knows of mixed precision."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

digits = load_digits()  # 1797 images of 8 by 8 pixels, which come with scikit-learn
images = np.float32(digits.data * 256)  # as a camera of 12 bits has them
random = np.random.default_rng(0)


def normal(rows, columns):
    return jnp.asarray(random.normal(size=(rows, columns)) * (2 / rows) ** 0.5, jnp.float32)


def shares(x):
    """Return each feature's share of the energy of its row."""
    energy = x * x
    return 16 * energy / energy.sum(-1, keepdims=True)


def predict(params, x):
    x = jax.nn.relu(x @ params["first"])
    with jax.named_scope("shares"):
        x = shares(x)
    x = jax.nn.relu(x @ params["second"])
    return x @ params["last"]


params = {"first": normal(64, 256), "second": normal(256, 256), "last": normal(256, 10)}
tx = optax.adamw(1e-3)
opt_state = tx.init(params)


@jax.jit
def train_step(params, opt_state, x, y):
    def loss_of(params):
        return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for step in range(options.steps):
    rows = random.integers(len(images), size=128)
    params, opt_state, loss = train_step(params, opt_state, images[rows], digits.target[rows])
    if step % 5 == 0 or step == options.steps - 1:
        print(f"step {step}: loss {loss:.3f}", flush=True)
