"""Programs that tests run as copies of a process: they are what a new Python would be."""

import pytest

from processes import run_python


@pytest.mark.parametrize("how", [{"fresh": True}, {}, {"nests": True}], ids=["new", "copy", "copy that is copied"])
def test_a_program_has_the_variables_that_python_sets_while_it_starts(tmp_path, how):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SET_AT_START'] = 'yes'\n")
    read = "import os; print(os.environ.get('SET_AT_START'), os.environ['PASSED'])"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {read!r}], check=True)"
    command = "-c", nested if "nests" in how else read
    done = run_python(*command, check=True, PYTHONPATH=str(tmp_path), CORPUS_SIMULATES="", PASSED="no", **how)
    assert done.stdout == "yes no\n"
