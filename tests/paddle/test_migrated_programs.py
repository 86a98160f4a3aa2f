"""What `ampx migrate` makes of programs written for `paddle.fluid` trains to the same losses, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="needs libcst, of the extra cli")
pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")

PROGRAMS = Path(__file__).parents[1] / "programs" / "fluid"
UNDER_THE_OLD_NAMES = """
import runpy, sys
import ampx_paddle.fluid as old
old.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(*command):
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gan.py", ["--use_amp", "--epoch", "1"]),
        ("image_classification.py", ["--fp16", "--num_epochs", "1"]),
        ("word2vec.py", ["--use_amp", "--steps", "20"]),
    ],
)
def test_losses_are_those_of_the_program_under_the_old_names(name, arguments, tmp_path):
    made = tmp_path / name
    made.write_bytes((PROGRAMS / name).read_bytes())
    subprocess.run([sys.executable, "-m", "ampx.cli", "migrate", "--write", str(made)], check=True)
    assert "ampx_paddle.fluid.install()" in made.read_text()
    before = train("-c", UNDER_THE_OLD_NAMES, str(PROGRAMS / name), *arguments)
    assert train(str(made), *arguments) == before


EAGER = """\
import json
import sys

import paddle

paddle.seed(0)
model = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=2)
found = []
for step in range(5):
    x = paddle.randn([8, 4])
    with paddle.amp.auto_cast():
        loss = model(x).square().mean() * (float("inf") if str(step) in sys.argv else 1.0)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.clear_grad()
    found.append([float(loss), model.weight.tolist()])
print(json.dumps(found))
"""


def test_losses_of_an_eager_loop_are_those_before_and_an_overflow_is_skipped(tmp_path):
    before, made = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(EAGER)
    made.write_text(EAGER)
    subprocess.run([sys.executable, "-m", "ampx.cli", "migrate", "--write", str(made)], check=True)
    assert "GradScaler" not in made.read_text()
    assert train(str(made)) == train(str(before))
    # Native defect: on a CPU the scaler switches itself off, so that the overflow is written into the weights.
    assert train(str(before), "2")[2][1] != train(str(before), "2")[1][1]
    skipped = train(str(made), "2")
    assert skipped[2][1] == skipped[1][1]
