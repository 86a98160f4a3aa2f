"""Scripts in the styles of public code: what `ampx migrate` makes of them trains as before, or it leaves them alone.

The scripts are in tests/programs/styles. Each leaves what it computed in `result`.
"""

import os
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import ampx
from ampx.migrate import files
from ampx.syntax.files import find

STYLES = Path(__file__).parents[1] / "programs" / "styles"

# Why a script needs a human: words of the finding.
LEFT = {
    "apex_amp/callbacks.py": "in `cb`: it cannot be told when gradients are read",
    "apex_amp/reader_behind_a_region.py": "in `watch`: it cannot be told when gradients are read",
    "apex_amp/reader_in_a_wrapper.py": "in `inner`: it cannot be told when gradients are read",
    "apex_amp/reader_is_a_property.py": "in `size`: it cannot be told when gradients are read",
    "apex_amp/training_is_a_generator.py": "`yield loss`: it cannot be shown where gradients of `opt` have to be true",
    "apex_amp/optimizers_of_a_dict.py": "`list(opts.values())`: what it is taken from keeps the optimizers",
    "apex_amp/plain_backward_first.py": "`opt.step()` also steps on gradients of a loss that did not go through",
    "torch_amp/dataclass_holder.py": "the scaler is passed to `State`, which is no function of the files",
    "torch_amp/in_a_list.py": '`GradScaler("cpu")` is not kept in a variable',
    "torch_amp/in_keywords.py": "the scaler is passed to `train`, which is no function of the files",
    "torch_amp/inherited_trainer.py": "it cannot be told whether `self.opt` is made after the session begins",
    "torch_amp/made_by_partial.py": "`GradScaler` is used without being called",
    "torch_amp/methods_by_name.py": "`scaler.scale` has no counterpart that is known",
    "torch_amp/optimizer_per_epoch.py": "`opt` is made more than once",
    "torch_amp/optimizer_replaced.py": "`opt` is made more than once",
    "torch_amp/type_of_optimizer.py": "`type(opt)` is the wrapper's class",
    "apex_amp/class_trainer_outside.py": "`engine = Engine(model, optimizer)` keeps the optimizer before",
    "apex_amp/clip_each_micro_step.py": "it cannot be shown where gradients of `optimizer` have to be true",
    "apex_amp/closure.py": "`closure` leaves gradients of `optimizer` behind",
    "apex_amp/nan_guard_without_zero.py": "it cannot be shown where gradients of `optimizer` have to be true",
    "apex_amp/other_name.py": "`optimizer.zero_grad()` uses the optimizer that was not wrapped",
    "apex_amp/pgd_unknown_delta.py": "`delta.grad`: it cannot be shown where gradients of `opt` have to be true",
    "apex_amp/scaled_elsewhere.py": "`amp.initialize` with an optimizer, and no `amp.scale_loss` in these files",
    "apex_amp/setup_function.py": "`setup` wraps an optimizer that its callers go on with",
    "torch_amp/backward_in_method_two_optimizers.py": "it cannot be told which optimizers this backward is for",
    "torch_amp/gradient_penalty.py": "`scaler.scale(loss)` is not followed by `.backward()`",
    "torch_amp/held_before.py": "`loop = Loop(model, optimizer)` keeps the optimizer before the session begins",
    "torch_amp/lists_of_optimizers.py": "it cannot be told where `optimizer` is made",
    "torch_amp/optimizer_dict.py": 'it cannot be told where `optimizers["main"]` is made',
    "torch_amp/raw_steps_in_the_same_branch.py": "`optimizer.step()` steps without the scaler where there may be one",
    "torch_amp/skip_detection.py": "asks for the scale between `step` and `update`",
    "torch_amp/warmup_raw.py": "`optimizer.step()` steps without the scaler where there may be one",
    "several_files/annotation_only": "a scaler with arguments that cannot be read",
    "several_files/apex_kwargs": "`amp.initialize` with arguments that cannot be read",
    "several_files/executor": "it cannot be told which optimizer this is for",
    "several_files/warmup_elsewhere": "`optimizer.step()` steps without the scaler where there may be one",
}
# Arguments with which a script is run, where that is not once without any.
ARGUMENTS = {
    "apex_amp/accumulate_hf.py": [[], ["--fp16"]],
    "apex_amp/input_gradient_helper.py": [[], ["--full"]],
    "torch_amp/conditional_scaler.py": [[], ["--amp"]],
    "torch_amp/scaler_in_a_branch.py": [[], ["--use_amp"]],
}
# The loss scale of two optimizers moves with their steps, not with `update`: all but the trace of the scale is equal.
SCALE_MOVES_WITH_STEPS = {"torch_amp/one_update.py", "torch_amp/critic_loop_one_update.py"}
SCRIPTS = [f"{folder}/{path.name}" for folder in ("apex_amp", "torch_amp") for path in (STYLES / folder).glob("*.py")]
PROGRAMS = [f"several_files/{path.name}" for path in (STYLES / "several_files").iterdir()]
STARTS = {"main.py", "train.py", "loop.py", "eval.py"}


def run(path, arguments, old_apex=False):
    """Run a script in this process; give its result. What it imports from beside it is forgotten again."""
    import ampx_torch.apex

    before, modules = list(sys.path), set(sys.modules)
    if old_apex:
        ampx_torch.apex.install()
    sys.path.insert(0, str(path.parent))
    sys.argv[1:] = arguments
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return runpy.run_path(str(path), run_name="__main__")["result"]
    finally:
        sys.path[:] = before
        ampx.shutdown()
        if old_apex:
            ampx_torch.apex.uninstall()
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(path.parent)):
                del sys.modules[name]


@pytest.fixture
def migrated(tmp_path, monkeypatch):
    """Migrate a copy of a script or program; give its place and what is told."""

    def migrate(name):
        monkeypatch.setattr(sys, "argv", ["script"])
        source, copy = STYLES / name, tmp_path / "copy"
        shutil.copytree(source, copy) if source.is_dir() else shutil.copytree(source.parent, copy)
        paths = [copy] if source.is_dir() else [copy / source.name]
        reports = files.examine(find(paths))
        for report in reports:
            if report.status == "changed":
                files.write(report)
        todos = [finding for report in reports for finding in report.findings if finding.kind == "todo"]
        return copy, reports, todos

    return migrate


def changed(name, copy):
    return [
        path
        for path in sorted(copy.rglob("*.py"))
        if path.read_text()
        != (STYLES / name if (STYLES / name).is_dir() else (STYLES / name).parent)
        .joinpath(path.relative_to(copy))
        .read_text()
    ]


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - set(LEFT)))
def test_a_migrated_script_trains_as_before(name, migrated):
    copy, _, todos = migrated(name)
    assert todos == []
    assert changed(name, copy) == [copy / Path(name).name]
    for arguments in ARGUMENTS.get(name, [[]]):
        before = run(STYLES / name, arguments, old_apex=name.startswith("apex_amp"))
        after = run(copy / Path(name).name, arguments)
        if name in SCALE_MOVES_WITH_STEPS:
            before[0], after[0] = ([row[0] for row in rows] for rows in (before[0], after[0]))
        assert after == before
        assert str(before) == str(after)  # NaN where there was one


@pytest.mark.parametrize("name", sorted(LEFT))
def test_what_cannot_be_shown_to_be_right_is_left_to_a_human(name, migrated):
    copy, reports, todos = migrated(name)
    (todo,) = todos
    assert LEFT[name] in todo.what
    if name == "several_files/apex_kwargs":  # one script of the folder has no part in that program
        assert [path.name for path in changed(name, copy)] == ["alone.py"]
    else:
        assert changed(name, copy) == []
    statuses = {report.path.name: report.status for report in reports}
    assert "changed" not in (statuses.values() if name != "several_files/apex_kwargs" else ())


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(LEFT)))
def test_a_program_of_several_files_trains_as_before(name, migrated):
    copy, _, todos = migrated(name)
    assert todos == []
    assert changed(name, copy)
    starts = [path for path in sorted(copy.iterdir()) if path.name in STARTS]
    assert starts
    for start in starts:
        before = run(STYLES / name / start.name, [], old_apex=name.startswith("several_files/apex"))
        assert run(start, []) == before


def test_every_script_is_run_or_left():
    assert set(LEFT) | set(ARGUMENTS) | SCALE_MOVES_WITH_STEPS <= {*SCRIPTS, *PROGRAMS}
    assert len(SCRIPTS) + len(PROGRAMS) > 50
    assert os.environ.get("AMPX_APEX_DTYPE") is None
