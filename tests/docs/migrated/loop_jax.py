import jax
import jax.numpy as jnp
import optax

import ampx
import ampx_jax

amp = ampx.init("jax", dtype="bfloat16", loss_scale="dynamic")
tx = optax.MultiSteps(ampx.wrap_optimizer(optax.sgd(0.5)), every_k_schedule=2)
predict = ampx_jax.autocast(lambda weight, x: x @ weight)


@jax.jit
def train_step(weight, state, factor):
    def scaled_loss(weight):
        loss = jnp.sum(predict(weight, jnp.ones((2, 4)))) * factor
        with ampx.scale_loss(loss, state) as scaled:
            return scaled

    updates, state = tx.update(jax.grad(scaled_loss)(weight), state, weight)
    return optax.apply_updates(weight, updates), state


weight = jnp.zeros((4, 1))
state = tx.init(weight)
for factor in (1.0, 1.0, jnp.inf, 1.0):
    weight, state = train_step(weight, state, factor)
assert weight[0, 0] == -1.0  # the first window was applied; the second had an overflow
assert ampx.loss_scale(state) == 32768.0
