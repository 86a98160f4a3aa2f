"""What starts a script's processes, each with `ampx run`; two of them on this machine, over gloo.

The oracle: both processes average gradients, so they tell the same norms, of batches that differ.
"""

import json
import pathlib
import socket

import pytest

from processes import run_python

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
AMPX = ("-m", "ampx", "run", "--dtype", "bfloat16", "--report", "out.json")


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def results(done):
    """Return what the processes printed; two may have written to one line."""
    decoder, every, start = json.JSONDecoder(), [], done.stdout.find('{"')
    while start != -1:
        result, end = decoder.raw_decode(done.stdout, start)
        every.append(result)
        start = done.stdout.find('{"', end)
    return every


def test_every_process_of_torchrun_trains_by_ampx(tmp_path):
    """`torchrun` is `python -m torch.distributed.run`."""
    address = ("--master_addr", "127.0.0.1", "--master_port", free_port())
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", *address, *AMPX)
    script = SCRIPTS / "with_accelerate.py"
    done = run_python(*launch, script, cwd=tmp_path, check=True, fresh=True, timeout=150, **LOOPBACK)
    first, second = results(done)
    assert first["dtypes"] == second["dtypes"] == ["torch.bfloat16"]
    assert first["norms"] == second["norms"]
    assert first["losses"] != second["losses"]
    assert done.stderr.count("ampx run: torch in bfloat16 on cpu") == 1
    reports = [json.loads((tmp_path / name).read_text()) for name in ("out.json", "out.rank1.json")]
    assert [(report["rank"], report["world_size"], report["steps"]) for report in reports] == [(0, 2, 2), (1, 2, 2)]


def test_accelerate_launch_trains_by_ampx(tmp_path):
    """On CPUs it starts one process; several need MPI."""
    options = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = ("-m", "accelerate.commands.launch", "--cpu", *options, *AMPX)
    script = SCRIPTS / "with_accelerate.py"
    done = run_python(*launch, script, cwd=tmp_path, check=True, fresh=True, timeout=150, **LOOPBACK)
    (result,) = results(done)
    assert result["dtypes"] == ["torch.bfloat16"]
    assert json.loads((tmp_path / "out.json").read_text())["steps"] == 4


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_lightnings_own_processes_train_by_ampx(strategy, tmp_path):
    """`ddp` starts the script again for the second process; the others train in two children."""
    script, arguments = SCRIPTS / "with_lightning.py", ("float32", "2", strategy)
    done = run_python(*AMPX, script, *arguments, cwd=tmp_path, check=True, fresh=True, timeout=150, **LOOPBACK)
    report = json.loads((tmp_path / "out.json").read_text())
    processes = [*([report] if strategy == "ddp" else []), *report["processes"]]
    assert [(process["dtype"], process["steps"]) for process in processes] == [("bfloat16", 2)] * 2
    assert "did not automate" not in done.stderr
    if strategy == "ddp":
        first, second = results(done)
        assert first["dtypes"] == second["dtypes"] == ["torch.bfloat16"]
        assert first["norms"] == second["norms"]
        assert first["losses"] != second["losses"]
