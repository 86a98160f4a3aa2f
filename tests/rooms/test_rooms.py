"""Every optional room can be taken out: the rest imports, passes the kit on the toy, and trains README's lines."""

import ast
import compileall
import functools
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from import_graphs import at_import, modules_in, names_imported, with_parents
from processes import run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
OURS = [path.name for path in sorted((ROOT / "backends").iterdir()) if path.is_dir()]
# By room, the paths that go (with the part of it in every backend), and what a user asks for that needs it.
ROOMS = {
    "loggers": (["ampx/loggers"], "import ampx; ampx.log_to"),
    "lint, migrate and syntax": (
        ["ampx/lint", "ampx/migrate", "ampx/syntax"],
        "import sys; from ampx.cli import main; sys.argv[1:] = ['lint', '.']; sys.exit(main())",
    ),
    "trainers": (["backends/*/trainers"], None),
    "apex": (["backends/ampx_apex"], "import ampx_torch.apex"),
    "fluid": (["backends/ampx_fluid"], "import ampx_paddle.fluid"),
    "run": (
        ["ampx/run", "backends/*/run", "backends/*/run.py"],
        "import sys; from ampx.cli import main; sys.argv[1:] = ['run', 'train.py']; sys.exit(main())",
    ),
    "numerics": (["ampx/numerics", "backends/*/numerics", "backends/*/numerics.py"], "import ampx; ampx.diagnose"),
    "shipping": (["ampx/shipping", "backends/*/inference.py"], "import ampx; ampx.convert"),
    "former names of TensorFlow": (["backends/ampx_tensorflow/old"], None),
    "former names of MXNet": (["backends/ampx_mxnet/old"], "import ampx_mxnet.amp"),
}
# By room, what else cannot be imported without it: parts of other rooms that stand upon it, and doors that say so.
WITH = {
    "loggers": "",
    "lint, migrate and syntax": r"ampx\.cli\.(lint|migrate)_command",
    "trainers": "",
    "apex": r"ampx_torch\.(apex|old)",
    "fluid": r"ampx_paddle\.(fluid|old)",
    "run": r"ampx\.numerics\.(checkpoint|child|report|trial|\w+_script)|ampx\.cli\.(compare_command|doctor)"
    r"|ampx\.testing\.(suite|kit\.automation)",
    "numerics": r"ampx\.shipping\.convert|ampx\.cli\.compare_command|ampx\.testing\.(suite|kit\.precision)"
    r"|ampx_(jax|tensorflow)\.run(\.\w+)?",
    "shipping": r"ampx\.testing\.(suite|kit\.shipping)",
    "former names of TensorFlow": r"ampx_tensorflow\.run\.tf1",
    "former names of MXNet": r"ampx_mxnet\.(amp|estimator)",
}
GONE = """
import sys

class Gone:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in {}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Gone)
"""
KIT = """
from ampx.testing.kit import casting, lifecycle, schedule, states, windows
from toy.harness import ExplicitToyHarness, ImplicitToyHarness

class TestImplicit(schedule.ScheduleTests, windows.SkipTests, casting.RegionTests, lifecycle.CapabilityTests):
    harness = ImplicitToyHarness

class TestExplicit(windows.AccumulationTests, states.StateTests):
    harness = ExplicitToyHarness
"""
TRAIN = {
    "torch": """
import ampx, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data, target = torch.randn(32, 4), torch.ones(32, 1)
amp = ampx.init(framework="torch", dtype="bfloat16", loss_scale="dynamic", device="cpu")
opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.1))
losses = []
for _ in range(20):
    loss = torch.nn.functional.mse_loss(model(data), target)
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
assert opt.last_step.applied and losses[-1] < losses[0] / 4, losses
""",
    "paddle": """
import ampx, paddle
paddle.seed(0)
model = paddle.nn.Linear(4, 1)
data, target = paddle.randn([32, 4]), paddle.ones([32, 1])
amp = ampx.init(framework="paddle", dtype="float32", loss_scale="dynamic", device="cpu")  # Paddle casts on GPUs only
opt = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
losses = []
for _ in range(20):
    loss = paddle.nn.functional.mse_loss(model(data), target)
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    opt.clear_grad()
    losses.append(float(loss))
assert opt.last_step.applied and losses[-1] < losses[0] / 4, losses
""",
}
INSTALLED = [name for name in TRAIN if importlib.util.find_spec(name)]


def paths_of(room, root):
    """Return the files and folders of a room."""
    return [path for pattern in ROOMS[room][0] for path in root.glob(pattern)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree in which is compiled, once for all rooms, what they import."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("ampx", "backends", "tests/kit/toy"):
        copy = shutil.copytree(
            ROOT / name, folder / Path(name).name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        for top in [copy / f"ampx_{framework}" for framework in INSTALLED] if name == "backends" else [copy]:
            compileall.compile_dir(top, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    return folder


@pytest.fixture(scope="module", params=ROOMS)
def house(request, tree, tmp_path_factory):
    """A copy of the tree without a room, whose plugins are registered as in an installation: its room and folder."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(tree, folder, dirs_exist_ok=True)
    gone = paths_of(request.param, folder)
    assert gone, "the room is not where this test looks for it"
    for path in gone:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["ampx"]
    info = folder / "ampx_precision-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ampx-precision\nVersion: 0.1.0\n")
    lines = [f"{name} = {module}" for name, module in points.items() if (folder / "backends" / module).is_dir()]
    (info / "entry_points.txt").write_text("\n".join(["[ampx]", *lines, ""]))
    # Where an installation of ampx has it, too, it must not be found there.
    (folder / "gone.py").write_text(GONE.format([path.name for path in gone if path.parent.name == "backends"]))
    return request.param, folder


def run(folder, *command):
    """Run Python in a house."""
    return run_python(*command, cwd=folder, PYTHONPATH=f"{folder}:{folder / 'backends'}")


def asked_for(name, path):
    """Return the modules that a module asks for when it is imported, by a door (`import_part`, `forward`), too."""
    tree = ast.parse(path.read_text())
    names = {module for full in names_imported(name, path, at_import(tree.body)) for module in with_parents(full)}
    for node in tree.body:
        for call in ast.walk(node) if isinstance(node, (ast.Expr, ast.Assign)) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("forward", "import_part"):
                names |= {value.value for value in call.args if isinstance(value, ast.Constant)}
    return names


@functools.cache
def every_import():
    """Return the files of ampx and its backends by module, and the modules of ours that each asks for."""
    files = {}
    for top in (ROOT / "ampx", *(ROOT / "backends" / name for name in OURS)):
        files |= modules_in(top)
    return files, {name: asked_for(name, path) & set(files) for name, path in files.items()}


@pytest.mark.parametrize("room", ROOMS)
def test_the_rest_needs_nothing_of_it_to_be_imported(room):
    files, needs = every_import()
    taken = {
        name for name, path in files.items() for gone in paths_of(room, ROOT) if path == gone or gone in path.parents
    }
    assert taken, "the room is not where this test looks for it"
    without = set()
    while more := {
        name
        for name in set(files) - taken - without
        if needs[name] & (taken | without) or name.rpartition(".")[0] in without
    }:
        without |= more
    accepted = re.compile(WITH[room] or "(?!)")
    assert [name for name in sorted(without) if not accepted.fullmatch(name)] == []
    assert not WITH[room] or without, "nothing needs the room: leave it out of WITH"


def importing(room, folder):
    """Return code that imports all that is left of ampx, and of the backends whose framework is installed."""
    files = modules_in(folder / "ampx")
    for name in INSTALLED:
        files |= modules_in(folder / "backends" / f"ampx_{name}")
    # Programs are not imported; demos and trainers need libraries of others.
    programs = re.compile(r"__main__|preloaded|\.trainers\b|_child$|\.demo$|plot$")
    left = [name for name in files if not programs.search(name) and not re.fullmatch(WITH[room] or "(?!)", name)]
    return f"import importlib, gone\nfor name in {left!r}:\n    importlib.import_module(name)\n"


@pytest.mark.skipif(bool(INSTALLED), reason="the environment without frameworks tests it")
def test_the_rest_imports_and_the_kit_passes_on_the_toy(house):
    room, folder = house
    (folder / "test_kit.py").write_text(importing(room, folder) + KIT)
    options = ("-q", "-x", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "--rootdir", str(folder))
    done = run(folder, "-m", "pytest", *options, "test_kit.py")
    assert done.returncode == 0, done.stdout[-1500:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20


@pytest.mark.parametrize("framework", TRAIN)
def test_the_rest_imports_and_the_lines_of_the_readme_train(house, framework):
    room, folder = house
    if framework not in INSTALLED:
        pytest.skip(f"{framework} is not installed in this environment")
    if not any(path.is_relative_to(ROOT / "backends" / f"ampx_{framework}") for path in paths_of(room, ROOT)):
        pytest.skip(
            f"nothing of the room is in the backend of {framework}: the environment without frameworks tests it"
        )
    done = run(folder, "-W", "ignore", "-c", importing(room, folder) + TRAIN[framework])
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.skipif(bool(INSTALLED), reason="the environment without frameworks tests it")
def test_what_is_asked_for_and_absent_says_so_in_a_sentence_of_ours(house):
    room, folder = house
    asked = ROOMS[room][1]
    if asked is None:
        pytest.skip("nothing in ampx asks for it by name")
    done = run(folder, "-c", f"import gone\n{asked}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert "has been taken out of this installation; accepted: an installation that has it. Reinstall" in last, last
