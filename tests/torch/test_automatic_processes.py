"""`ampx run` of scripts that start processes: the children train as the parent would, and the report says so.

The oracle is arithmetic: bfloat16 holds all numbers exactly.
"""

import json
import sys

import pytest

from processes import run_python

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("typer", reason="needs typer, of the extra cli")

TRAINING = """\
import sys
import torch
import torch.multiprocessing as mp

def train(number, model=None):
    model = torch.nn.Linear(4, 1) if model is None else model
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(3 + number):
        optimizer.zero_grad()
        output = model(torch.ones(2, 4))
        output.float().sum().backward()
        optimizer.step()
    print(number, output.dtype, model.bias.item(), flush=True)

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "torch":
        mp.spawn(train, nprocs=2)
    else:
        context = mp.get_context(how.removeprefix("hogwild "))
        model = torch.nn.Linear(4, 1).share_memory() if "hogwild" in how else None
        children = [context.Process(target=train, args=(number, model)) for number in range(2)]
        for child in children:
            child.start()
            child.join()  # one after the other, so that shared weights have one value
        sys.exit(sum(child.exitcode != 0 for child in children))
"""


# Both start a Python of their own, as torch.multiprocessing does.
FRESH = [pytest.param(how, marks=pytest.mark.nightly) for how in ("spawn", "forkserver")]


@pytest.mark.parametrize("how", ["torch", *FRESH, "fork", "hogwild fork"])
def test_children_train_as_the_parent_would_and_are_reported(how, tmp_path):
    if sys.platform == "win32" and how != "torch":
        pytest.skip("only spawn exists there")
    (tmp_path / "train.py").write_text(TRAINING)
    run = ("-m", "ampx", "run", "--dtype", "bfloat16", "--report", "out.json", "train.py", how)
    done = run_python(*run, cwd=tmp_path, check=True)
    # By arithmetic: each step takes a rate of 1/4 times two outputs from the bias.
    assert sorted(done.stdout.splitlines()) == ["0 torch.bfloat16 -1.5", "1 torch.bfloat16 -2.0"]
    facts = json.loads((tmp_path / "out.json").read_text())
    children = facts["processes"]
    assert [child["optimizers"][0]["steps"] for child in children] == [3, 4]
    for child in children:
        assert (child["framework"], child["dtype"], child["refusal"]) == ("torch", "bfloat16", "")
        assert {operation["dtype"] for operation in child["ops"] if operation["op"] == "addmm"} == {"bfloat16"}
    assert facts["framework"] is None
    assert "ampx run: torch in bfloat16 on cpu" in done.stderr
    assert "2 that the script started by multiprocessing trained" in done.stderr
    assert "nothing to automate" not in done.stderr
    assert done.stderr.count("SGD         3 steps") == done.stderr.count("SGD         4 steps") == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_refusal_in_a_child_is_one_of_the_script(tmp_path):
    (tmp_path / "train.py").write_text(
        "import multiprocessing, torch\n"
        "def train():\n"
        "    torch.amp.GradScaler('cpu')\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=train)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    done = run_python("-m", "ampx", "run", "train.py", cwd=tmp_path)
    assert done.returncode == 3
    assert "ampx run: refused:" in done.stderr
    assert "train.py:3: the script makes a GradScaler of its own" in done.stderr


def test_data_loaders_with_workers_are_no_processes_that_train(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in torch.utils.data.DataLoader(torch.ones(8, 4), 4, num_workers=1):\n"
        "    model(x).float().sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = run_python("-m", "ampx", "run", "--report", "out.json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out.json").read_text())
    assert (facts["processes"], facts["steps"]) == ([], 2)


def test_options_that_this_machine_cannot_honour_stop_a_script_with_a_session_of_its_own_too(tmp_path):
    (tmp_path / "train.py").write_text("import ampx\nampx.init('torch', dtype='bfloat16')\nprint('went on')\n")
    for option in (("--device", "cuda:99"), ("--level", "O9")):
        done = run_python("-m", "ampx", "run", *option, "train.py", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert ".." not in done.stderr.strip().splitlines()[-1]
    done = run_python("-m", "ampx", "run", "--dtype", "float16", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "torch in bfloat16" in done.stderr
    assert "its options do not hold there" in done.stderr
