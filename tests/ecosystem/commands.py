"""What every command that runs a script must do with scripts for libraries.

The oracle is what the script prints in plain Python: the losses of its steps.
"""

import functools
import json
from pathlib import Path
from typing import ClassVar

import pytest

from processes import run_python

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 4  # of every script
# As `ampx compare` has it: losses agree that differ by eight roundings.
ROUNDINGS = {"float32": 8 * 2.0**-24, "float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}


def losses_of(done):
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def plain(script):
    return losses_of(run_python(SCRIPTS / f"{script}.py"))


class EveryCommand:
    """The tests, of the scripts that a class names."""

    framework = ""
    scripts = ()
    exact = True  # what is not cast is computed to the bit as without ampx
    coarse: ClassVar = {}  # by script: the largest relative rounding that the script does by itself

    @pytest.fixture
    def ampx(self, script, tmp_path):
        def run(command, *options):
            options = ("--device", "cpu", "--report", "out.json", *options)
            done = run_python("-m", "ampx", command, *options, SCRIPTS / f"{script}.py", cwd=tmp_path, nests=True)
            report = tmp_path / "out.json"
            return done, json.loads(report.read_text()) if report.exists() else None

        return run

    def test_it_trains_as_in_plain_python_where_nothing_is_cast(self, script, ampx):
        done, facts = ampx("run", "--level", "O0")
        expected = plain(script) if self.exact else pytest.approx(plain(script), rel=ROUNDINGS["float32"])
        assert losses_of(done) == expected
        assert (facts["framework"], facts["dtype"]) == (self.framework, "float32")
        assert (facts["steps"], facts["skipped"]) == (STEPS, 0)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_it_trains_in_low_precision_as_far_as_that_resolves(self, script, ampx, dtype, tmp_path):
        # With a scale that fits: the first steps with 65536 are skipped, or a solver that is not finite raises.
        scale = "1024.0" if dtype == "float16" else '"auto"'
        facts = {"schema": "ampx.policy/1", "framework": self.framework, "dtype": dtype, "level": "O1"}
        policy = [f'{key} = "{value}"' for key, value in facts.items()]
        (tmp_path / "ampx.toml").write_text("\n".join([*policy, f"loss_scale = {scale}"]))
        done, facts = ampx("run", "--policy", "ampx.toml")
        rounding = max(ROUNDINGS[dtype], self.coarse.get(script, 0))
        assert losses_of(done) == pytest.approx(plain(script), rel=rounding)
        assert (facts["framework"], facts["dtype"]) == (self.framework, dtype)
        assert (facts["steps"], facts["skipped"]) == (STEPS, 0)
        assert [operation for operation in facts["ops"] if operation["dtype"] == dtype]

    def test_it_is_compared(self, script, ampx):
        done, facts = ampx("compare", "--dtype", "bfloat16", "--steps", "4", "--repeats", "1")
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        assert list(facts["dtypes"]) == ["bfloat16"]

    def test_it_is_diagnosed(self, script, ampx):
        done, facts = ampx("diagnose", "--dtype", "bfloat16", "--at", "2")
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        assert facts["framework"] == self.framework
