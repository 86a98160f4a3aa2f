"""`ampx migrate` and programs of several files, gradients that are read in between, and large files."""

import os
import resource
import sys
import textwrap
from pathlib import Path

import pytest

from ampx.migrate import files
from ampx.migrate.engine import migrate as migrate_bytes
from ampx.syntax import processes
from ampx.syntax.files import find

# -- gradients that are read before the step: apex leaves true ones behind, ampx scaled ones --------------------

HEAD = """\
import torch
from apex import amp

model, opt = amp.initialize(model, opt, opt_level="O1")
"""


def test_no_unscale_goes_into_a_loop_of_several_backwards_a_step(migrate):
    """As adversarial attacks have it: the second `scale_loss` after an `unscale` would raise."""
    loop = """\
        for _ in range(iters):
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            grad = {read}
            delta.data = delta + alpha * torch.sign(grad)
            delta.grad.zero_()
        """
    status, after, findings = migrate(HEAD + textwrap.dedent(loop).format(read="delta.grad.detach()"))
    assert status == "blocked"
    assert findings == [(8, "todo", "`delta.grad`: it cannot be shown where gradients of `opt` have to be true")]
    shown = "delta = torch.zeros_like(x).uniform_(-1, 1)\n" + textwrap.dedent(loop).format(read="delta.grad.detach()")
    status, after, findings = migrate(HEAD + shown)
    assert (status, findings) == ("changed", [])
    assert "unscale" not in after


def test_no_unscale_goes_into_the_branch_that_does_not_scale(migrate):
    status, after, findings = migrate(
        textwrap.dedent(
            """\
            import torch
            from apex import amp

            def get_grad(model, x, y, opt, half_prec):
                if half_prec:
                    with amp.scale_loss(loss, opt) as scaled_loss:
                        grad = torch.autograd.grad(scaled_loss, delta)[0]
                else:
                    grad = torch.autograd.grad(loss, delta)[0]
                return grad

            def train(model, opt):
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
                get_grad(model, x, y, opt, True)
                opt.step()
            """
        )
    )
    assert (status, findings) == ("changed", [])
    assert "unscale" not in after


@pytest.mark.parametrize(
    ("code", "inserted"),
    [
        # a path without a block, told apart by the test
        (
            """\
            if fp16:
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            opt.step()
            """,
            """\
            if fp16:
                ampx.unscale(opt)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            """,
        ),
        # a path without a block that nothing tells apart: right behind the block, then
        (
            """\
            if uses_fp16():
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            opt.step()
            """,
            """\
            if uses_fp16():
                with ampx.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
                ampx.unscale(opt)
            else:
            """,
        ),
        # before the whole loop over the parameters
        (
            """\
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            for p in model.parameters():
                if p.grad is not None:
                    norms.append(p.grad.norm())
            opt.step()
            """,
            """\
            ampx.unscale(opt)
            for p in model.parameters():
                if p.grad is not None:
            """,
        ),
        # in a function that is called between backward and step
        (
            """\
            def log(model):
                return [p.grad.norm() for p in model.parameters()]

            for x in data:
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
                if verbose:
                    log(model)
                opt.step()
            """,
            """\
                if verbose:
                    ampx.unscale(opt)
                    log(model)
            """,
        ),
    ],
)
def test_unscale_goes_in_where_every_way_scaled_and_a_step_follows(code, inserted, migrate):
    status, after, findings = migrate(HEAD + textwrap.dedent(code))
    assert (status, findings) == ("changed", [])
    assert (
        textwrap.dedent(inserted) in textwrap.dedent(after)
        or textwrap.indent(textwrap.dedent(inserted), "    ") in after
    )
    assert after.count("ampx.unscale(opt)") == 1


@pytest.mark.parametrize(
    ("code", "line"),
    [
        # accumulation with a look in every backward
        (
            """\
            for i, x in enumerate(data):
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
                norms.append(model.weight.grad.norm())
                if i % 2:
                    opt.step()
                    opt.zero_grad()
            """,
            8,
        ),
        # a way out between the look and the step
        (
            """\
            for i, x in enumerate(data):
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
                if model.weight.grad.norm() > 1:
                    continue
                opt.step()
            """,
            8,
        ),
        # a function whose caller is not there
        (
            """\
            def backward(loss, opt):
                with amp.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
            """,
            5,
        ),
    ],
)
def test_where_it_cannot_be_shown_a_human_decides(code, line, migrate):
    status, _, findings = migrate(HEAD + textwrap.dedent(code))
    assert status == "blocked"
    assert [finding[:2] for finding in findings] == [(line, "todo")]


# -- files of one program ---------------------------------------------------------------------------------------

BACKWARD = """\
from apex import amp


def backward(loss, opt):
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
"""
TRAIN = """\
from apex import amp
from utils import backward

model, opt = amp.initialize(model, opt{options})
for x in data:
    backward(loss, opt)
    opt.step()
"""


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def statuses(reports):
    return {report.path.stem: report.status for report in reports}


def test_files_of_one_program_are_left_together_and_what_is_no_part_of_it_is_not(tmp_path, ampx_command):
    write(
        tmp_path,
        utils=BACKWARD,
        train_a=TRAIN.format(options=", **options"),
        train_b=TRAIN.format(options=""),
        alone=TRAIN.format(options="").replace("from utils import backward\n", BACKWARD.partition("\n\n\n")[2]),
    )
    reports = files.examine(find([tmp_path]))
    assert statuses(reports) == {"utils": "blocked", "train_a": "blocked", "train_b": "blocked", "alone": "changed"}
    done = ampx_command("migrate", str(tmp_path), code=1).stdout
    assert "train_a.py:4: todo: `amp.initialize` with arguments that cannot be read" in done
    assert "train_b.py:1: note: it is left as it is, with the program of" in done
    assert (
        "4 files read, 1 to migrate, 3 left as they are, 0 that cannot be read or written, 1 place for a human" in done
    )
    (tmp_path / "train_a.py").unlink()
    assert set(statuses(files.examine(find([tmp_path]))).values()) == {"changed"}


def test_a_file_that_imports_one_that_was_not_named_is_left(tmp_path):
    write(tmp_path, utils=BACKWARD, train=TRAIN.format(options=""))
    (report,) = files.examine([tmp_path / "train.py"])
    assert report.status == "blocked"
    (finding,) = report.findings
    assert (finding.kind, finding.advice) == ("todo", "Pass that file, too.")
    assert "utils.py" in finding.what


def test_a_file_that_cannot_be_parsed_keeps_its_program_from_being_migrated(tmp_path):
    write(tmp_path, utils=BACKWARD + "def f(:\n", train=TRAIN.format(options=""))
    assert statuses(files.examine(find([tmp_path]))) == {"utils": "error", "train": "blocked"}


def test_relative_imports_and_imports_of_a_package_connect_files(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    write(package, __init__="from .utils import backward\n", utils=BACKWARD)
    write(tmp_path, train=TRAIN.format(options=", **options").replace("from utils", "from pkg"))
    assert statuses(files.examine(find([tmp_path])))["utils"] == "blocked"


SCALER = """\
import torch
from engine import train

optimizer = torch.optim.SGD(parameters, lr=0.1)
scaler = torch.amp.GradScaler("cpu")
train(optimizer, scaler)
"""
ENGINE = """\
from typing import Optional

import torch


def train(optimizer, scaler: Optional[torch.amp.GradScaler] = None):
    for loss in losses:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_a_scaler_is_followed_into_another_file_and_its_annotation_goes_along(tmp_path):
    write(tmp_path, train=SCALER, engine=ENGINE)
    engine, train = files.examine(find([tmp_path]))
    assert (engine.status, train.status) == ("changed", "changed")
    after = engine.after.decode()
    assert "scaler: Optional[ampx.Amp] = None" in after
    assert "with ampx.scale_loss(loss, optimizer) as scaled_loss:" in after
    assert "import ampx\nimport torch" in after


def test_a_file_in_which_nothing_but_an_annotation_would_change_stays(tmp_path):
    relay = """\
        import torch
        from engine import train


        def relay(optimizer, scaler: torch.amp.GradScaler):
            train(optimizer, scaler)
        """
    write(tmp_path, train=SCALER.replace("engine", "relay").replace("train(", "relay("), engine=ENGINE)
    (tmp_path / "relay.py").write_text(textwrap.dedent(relay))
    (tmp_path / "train.py").write_text(SCALER.replace("from engine import train", "from relay import relay as train"))
    assert statuses(files.examine(find([tmp_path]))) == {
        "train": "changed",
        "engine": "changed",
        "relay": "unchanged",
    }


# -- large files and large trees --------------------------------------------------------------------------------


def long_script(lines):
    recipe = [
        "import torch",
        "optimizer = torch.optim.SGD(parameters, lr=0.1)",
        "scaler = torch.amp.GradScaler()",
        "scaler.scale(loss).backward()",
        "scaler.step(optimizer)",
        "scaler.update()",
    ]
    kinds = ("y = {0} + y", "def f{0}(a, b={0}): return a + b", "table[{0}] = f({0}, 'a')", "y = [q for q in z]")
    return "\n".join([*recipe, *(kinds[n % 4].format(n) for n in range(lines - len(recipe)))]).encode()


def test_work_grows_with_the_length_of_a_file():
    """A quadratic step would run 16 times as many lines of code; time itself depends on the machine."""

    def lines_run(length):
        data, count = long_script(length), 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            report = migrate_bytes(Path("script.py"), data)
        finally:
            sys.settrace(before)
        assert report.status == "changed"
        return count

    assert lines_run(800) < 6 * lines_run(200)


def test_a_file_without_the_names_is_not_even_parsed(tmp_path):
    (tmp_path / "other.py").write_text("def f(:  # no Python\n")
    (report,) = files.examine([tmp_path / "other.py"])
    assert (report.status, report.findings) == ("unchanged", [])


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
def test_large_trees_are_done_on_all_processors_with_the_same_result_and_progress_is_told(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / f"script_{number}.py").write_bytes(long_script(1_000))
    here = files.examine(find([tmp_path]))
    monkeypatch.setattr(processes, "_WORTH_PROCESSES", 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    events = []
    there = files.examine(find([tmp_path]), lambda *arguments: events.append(arguments))
    assert [vars(report) for report in there] == [vars(report) for report in here]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    for name in ("Reading", "Rewriting"):
        done = [arguments[1] for arguments in events if arguments[0] == name]
        assert done[0] == 0
        assert done[-1] == size
        assert done == sorted(done)
        assert len(done) == 5


# -- who else has the optimizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (
            "def setup(model, optimizer):\n    return amp.initialize(model, optimizer)\nsetup(model, optimizer)\n",
            "`setup` returns the wrapped optimizer, which is not used here",
        ),
        (
            "class T:\n    def __init__(self, model, opt):\n        self.opt = opt\n"
            "        self.model, self.opt = amp.initialize(model, self.opt)\n"
            "opt = torch.optim.SGD(p)\nt = T(model, opt)\nopt.step()\n",
            "`opt.step()` uses the optimizer that was not wrapped",
        ),
        (
            "m, a = amp.initialize(m, a)\nn, b = amp.initialize(n, b)\n",
            "a second `amp.initialize`; a process has one session of ampx for PyTorch",
        ),
    ],
)
def test_an_optimizer_that_somebody_else_goes_on_with_is_for_a_human(code, what, migrate):
    status, _, findings = migrate(f"import torch\nfrom apex import amp\n{code}")
    assert status == "blocked"
    assert [finding[1:] for finding in findings] == [("todo", what)]


def test_branches_may_have_an_initialize_each(migrate):
    code = (
        "if args.o2:\n    m, o = amp.initialize(m, o, opt_level='O2')\nelse:\n    m, o = amp.initialize(m, o)\n"
        "with amp.scale_loss(loss, o) as scaled:\n    scaled.backward()\n"
    )
    status, after, findings = migrate(f"from apex import amp\n\n{code}")
    assert (status, findings) == ("changed", [])
    assert after.count("ampx.init(") == 2


def test_a_scaler_that_other_code_may_reach_is_for_a_human(migrate):
    code = """\
        import torch

        class Trainer:
            def __init__(self):
                self.optimizer = torch.optim.SGD(parameters, lr=0.1)
                self.scaler = torch.amp.GradScaler("cpu")

            def step(self, loss):
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

        def report(trainer):
            print(trainer.scaler.get_scale())
        """
    status, _, findings = migrate(textwrap.dedent(code))
    assert status == "blocked"
    assert findings == [(14, "todo", "`trainer.scaler` may be the scaler")]


@pytest.mark.parametrize(
    "line", ["x = scaler.state_dict()['scale']", "x = {'scaler': scaler}", "x = getattr(scaler, n)"]
)
def test_uses_of_a_scaler_that_a_session_does_not_have_are_for_a_human(line, migrate):
    code = """\
        import torch
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """
    assert migrate(textwrap.dedent(code) + line + "\n")[0] == "blocked"


def test_generated_lines_are_no_longer_than_100_characters(migrate):
    code = (
        "from apex import amp\n\ndef main(args):\n    if args.fp16:\n        model, optimizer = amp.initialize(model, "
        "optimizer, opt_level=args.opt_level, loss_scale=args.static_loss_scale, min_loss_scale=args.minimum, "
        "max_loss_scale=args.maximum, enabled=args.enabled)\n"
        "    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()\n    optimizer.step()\n"
    )
    status, after, _ = migrate(code)
    assert status == "changed"
    assert max(map(len, after.splitlines())) <= 100
