"""The backend, plugin and harness of the page "Write a backend" pass the conformance kit, as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-backend.md"


def test_the_backend_of_the_page_passes_the_kit(tmp_path):
    imports, verbs, plugin, _, harness = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    package = tmp_path / "ampx_mini"
    package.mkdir()
    (package / "backend.py").write_text(imports + verbs)
    # The page tells the reader where the import goes in a package.
    told = "# In a package: from .backend import MiniBackend, here and not at the top."
    assert told in plugin
    (package / "__init__.py").write_text("import ampx\n" + plugin.replace(told, "from .backend import MiniBackend"))
    tests = tmp_path / "test_mini.py"
    tests.write_text(imports + harness)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 90
