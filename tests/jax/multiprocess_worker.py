"""One of two processes with one device each: trains on a batch that both hold a half of, and writes what it saw."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ampx

FINITE = np.array([0.25, -0.5, 1.5], np.float32)


def main():
    rank, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    amp = ampx.init("jax", level="O0", loss_scale=ampx.LossScale(growth_interval=2))
    tx = amp.wrap_optimizer(optax.sgd(0.25, momentum=0.9))
    params = jax.device_put(jnp.array([1.0, -2.0, 0.5]), NamedSharding(mesh, P()))
    state = jax.jit(tx.init, out_shardings=NamedSharding(mesh, P()))(params)

    @jax.jit
    def step(params, state, rows):
        def scaled_loss(params):
            with ampx.scale_loss(jnp.mean(rows @ params), state) as scaled:
                return scaled

        updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    seen = []
    for overflow in (False, True, False, False):
        mine = np.where([False, overflow and rank == 1, False], np.inf, FINITE * (rank + 1)).astype(np.float32)
        rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("batch")), mine[None])
        params, state = step(params, state, rows)
        result = ampx.last_step(state)
        seen.append([result.applied, result.scale, result.next_scale, np.asarray(params).tolist()])
    (folder / f"{rank}.json").write_text(json.dumps([jax.process_count(), seen]))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
