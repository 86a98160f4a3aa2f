"""The magnitude of a quiet frequency: a square of 1e-4 is 0 in float16, and the root of 0 has an infinite slope."""

import json
import sys

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Spectrum(equinox.Module):
    cosines: np.ndarray
    sines: np.ndarray

    def __init__(self, size):
        angles = 2 * np.pi * np.outer(np.arange(size), np.arange(1, size // 2)) / size
        self.cosines, self.sines = np.cos(angles).astype("float32"), np.sin(angles).astype("float32")

    def __call__(self, frame):
        real, imaginary = frame @ self.cosines, frame @ self.sines
        return jnp.sqrt(real * real + imaginary * imaginary)


class Enhancer(equinox.Module):
    layers: equinox.nn.MLP
    spectrum: Spectrum

    def __call__(self, frame):
        return self.spectrum(frame * (1.0 + 0.1 * jnp.tanh(self.layers(jnp.log(jnp.abs(frame) + 1e-3)))))


keys = jax.random.split(jax.random.key(0), 3)
model = Enhancer(equinox.nn.MLP(16, 16, 32, 1, key=keys[0]), Spectrum(16))
loudness = jnp.ones((24, 1)).at[3].set(1.0 if "--twin" in sys.argv else 2e-5)  # a pause
frames = loudness * jax.random.normal(keys[1], (24, 16))
clean = jax.vmap(model.spectrum)(frames * 1.05)
optimizer = optax.adam(3e-3)
state = optimizer.init(equinox.filter(model.layers, equinox.is_inexact_array))


@equinox.filter_jit
def step(model, state):
    def loss_of(layers):
        enhanced = jax.vmap(Enhancer(layers, model.spectrum))(frames)
        return jnp.mean((enhanced - clean) ** 2)

    loss, gradients = equinox.filter_value_and_grad(loss_of)(model.layers)
    updates, state = optimizer.update(gradients, state)
    return Enhancer(equinox.apply_updates(model.layers, updates), model.spectrum), state, loss


losses = []
for _ in range(12):
    model, state, loss = step(model, state)
    losses.append(float(loss))
print(json.dumps(losses))
