"""Train a small network on handwritten digits with JAX and optax."""

import argparse
import json
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


def init_params(key, sizes):
    params = []
    for inputs, outputs in pairwise(sizes):
        key, own_key = jax.random.split(key)
        params.append(
            {"w": jax.random.normal(own_key, (inputs, outputs)) * (2 / inputs) ** 0.5, "b": jnp.zeros(outputs)}
        )
    return params


def predict(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y):
    logits = predict(params, x)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


@partial(jax.jit, static_argnames="tx", donate_argnums=(0, 1))
def train_step(params, opt_state, x, y, tx):
    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, accuracy


@jax.jit
def accuracy_of(params, x, y):
    return (predict(params, x).argmax(-1) == y).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    digits = load_digits()
    rng = np.random.default_rng(args.seed)
    order = rng.permutation(len(digits.data))
    x, y = (digits.data[order] / 16).astype(np.float32), digits.target[order]
    test_x, test_y = x[1400:], y[1400:]

    params = init_params(jax.random.key(args.seed), [64, args.hidden, args.hidden, 10])
    steps = 1400 // args.batch_size
    schedule = optax.cosine_decay_schedule(args.lr, steps * args.epochs)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    opt_state = tx.init(params)
    losses = []
    for epoch in range(args.epochs):
        for batch in np.array_split(rng.permutation(1400)[: steps * args.batch_size], steps):
            params, opt_state, loss, accuracy = train_step(params, opt_state, x[batch], y[batch], tx)
            losses.append(float(loss))
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")

    metric = float(accuracy_of(params, test_x, test_y))
    print(f"test accuracy: {metric:.4f}")
    print(json.dumps({"losses": losses, "metric": metric}))


if __name__ == "__main__":
    main()
