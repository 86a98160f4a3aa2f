"""`ampx diagnose` of a script that resumes by itself where its checkpoint is there, with `--from`."""

import json

import numpy as np
import pytest

from processes import run_python

pytest.importorskip("flax", reason="flax is not installed")
# The second batch behind the checkpoint, in step 6, is beyond float16 in the second layer.
SCRIPT = """
import os
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Net(nn.Module):
    def setup(self):
        self.first = nn.Dense(4, use_bias=False, kernel_init=nn.initializers.constant(1.0))
        self.wide = nn.Dense(4, use_bias=False, kernel_init=nn.initializers.constant(1e2))

    def __call__(self, x):
        return self.wide(self.first(x)) * 1e-3


net = Net()
params = net.init(jax.random.key(0), jnp.ones((4, 4)))
tx = optax.sgd(1e-6)
state = tx.init(params)


@jax.jit
def train(params, state, x):
    loss, grads = jax.value_and_grad(lambda params: net.apply(params, x).astype(jnp.float32).mean())(params)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


saved = dict(np.load("saved.npz")) if os.path.exists("saved.npz") else {"step": 0}
if saved["step"]:
    leaves = [jnp.asarray(saved[str(number)]) for number in range(2)]
    params = jax.tree.unflatten(jax.tree.structure(params), leaves)
print(int(saved["step"]), file=open("starts.txt", "a"))
for step in range(int(saved["step"]), 8):
    params, state, loss = train(params, state, jnp.full((4, 4), 300.0 if step == 5 else 1.0))
    leaves = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(params))}
    np.savez("saved.npz", step=step + 1, **leaves)
"""


def test_a_script_that_resumes_by_itself_is_diagnosed_from_its_checkpoint_which_stays(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ones = np.ones((4, 4), np.float32)
    np.savez(tmp_path / "saved.npz", **{"step": 4, "0": ones, "1": 100 * ones})
    before = (tmp_path / "saved.npz").read_bytes()
    command = ("-m", "ampx", "diagnose", "--framework", "jax", "--device", "cpu", "--dtype", "float16", "--json")
    done = run_python(*command, "--from", "saved.npz", "train.py", cwd=tmp_path, nests=True)
    report = json.loads(done.stdout)
    assert (report["step"], report["diagnosis"]["kind"]) == (2, "overflow")
    assert report["diagnosis"]["first_nonfinite"]["module"] == "wide"
    assert set((tmp_path / "starts.txt").read_text().split()) == {"4"}
    assert (tmp_path / "saved.npz").read_bytes() == before
