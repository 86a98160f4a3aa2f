"""Programs in the published style of apex's day, unedited: mixed precision gives what the same program gives at O0.

How far two runs may differ is derived from the O0 run alone:

- The first loss has seen no update. In float16 each of the operations on the way from input to loss rounds its result
  to 2**-11 of it; there are at most 16 in a row in these programs.
- Later losses are noisy, since every step draws another batch. The mean of the last quarter of n losses, whose standard
  deviation is s, is known to s / sqrt(n); two such means agree within 3 * s * sqrt(2 / n).
- An accuracy p on m images is known to sqrt(p * (1 - p) / m), and again two agree within 3 * sqrt(2) times that.
"""

import functools
import json
import math
import pathlib
import re
import socket
import statistics

import pytest
import torch.distributed

import processes

PROGRAMS = pathlib.Path(__file__).parents[2] / "programs" / "apex"
RUN = (
    "import runpy, sys, ampx_torch.apex; ampx_torch.apex.install(); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
SECONDS = 240
TEST_IMAGES = 360
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(program, *options, runner=("-c", RUN), **environment):
    return processes.Started([*runner, PROGRAMS / f"{program}.py", *options], **environment)


def finish(*ranks):
    ended = processes.finish(ranks, SECONDS)
    assert all(done.returncode == 0 for done in ended), ended[0].stderr[-3000:]
    return [json.loads(done.stdout.splitlines()[-1]) for done in ended]


@functools.cache
def result(program, *options):
    pytest.importorskip("sklearn", reason="the programs train on scikit-learn's digits")
    return finish(start(program, *options))[0]


def last_quarter(losses):
    return losses[-(len(losses) // 4) :]


def noise(losses):
    """How far the means of the last quarters of two equally good runs may be apart."""
    quarter = last_quarter(losses)
    return 3 * statistics.stdev(quarter) * math.sqrt(2 / len(quarter))


def judge(actual, reference, accuracy=True):
    losses, expected = actual["losses"], reference["losses"]
    assert len(losses) == len(expected)
    assert losses != expected, "the program did not train in mixed precision"
    assert losses[0] == pytest.approx(expected[0], rel=16 * 2.0**-11)
    assert statistics.fmean(last_quarter(losses)) == pytest.approx(
        statistics.fmean(last_quarter(expected)), abs=noise(expected)
    )
    if accuracy:
        p = reference["metric"]
        assert actual["metric"] == pytest.approx(p, abs=3 * math.sqrt(2 * p * (1 - p) / TEST_IMAGES))


@pytest.mark.parametrize(
    "options",
    [
        ("O1",),
        pytest.param(("O2",), marks=pytest.mark.nightly),
        pytest.param(("O2", "--keep-batchnorm-fp32", "True", "--loss-scale", "128.0"), marks=pytest.mark.nightly),
    ],
)
def test_image_classification(options):
    reference = result("image_classification", "--opt-level", "O0")
    assert reference["metric"] > 0.95
    judge(result("image_classification", "--opt-level", *options), reference)


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gan_with_two_optimizers_and_three_losses(level):
    reference = result("gan", "--opt-level", "O0")
    own = result("gan", "--opt-level", level)
    judge(own, reference, accuracy=False)
    # The brightness of a digit, between -1 and 1, has a standard deviation below 0.15; the metric averages 64.
    assert own["metric"] == pytest.approx(reference["metric"], abs=3 * 0.15 * math.sqrt(2 / 64))


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_language_model_with_accumulation_and_clipping(level):
    reference = result("language_model", "--opt-level", "O0")
    assert statistics.fmean(last_quarter(reference["losses"])) < 0.6 * reference["losses"][0]
    own = result("language_model", "--opt-level", level)
    judge(own, reference, accuracy=False)
    # The logarithm of the perplexity is a loss.
    assert math.log(own["metric"]) == pytest.approx(math.log(reference["metric"]), abs=noise(reference["losses"]))


@pytest.mark.nightly
@pytest.mark.parametrize("options", [("O1",), ("O2",), ("O1", "--loss-scale", "1024")])
def test_rnn(options):
    reference = result("rnn", "--opt-level", "O0")
    assert reference["metric"] > 0.8
    judge(result("rnn", "--opt-level", *options), reference)


@pytest.mark.parametrize(
    "options", [pytest.param(("--static-loss-scale", "128"), marks=pytest.mark.nightly), ("--dynamic-loss-scale",)]
)
def test_the_optimizer_from_before_amp(options):
    reference = result("fp16_optimizer", "--opt-level", "O0")
    assert reference["metric"] > 0.9
    judge(result("fp16_optimizer", "--fp16", *options), reference)


@pytest.mark.parametrize(
    "program",
    [
        "image_classification",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gan", "language_model", "rnn")),
    ],
)
def test_ampx_run_gives_what_install_gives(program):
    pytest.importorskip("typer", reason="the command line is an extra")
    (own,) = finish(start(program, "--opt-level", "O1", runner=("-m", "ampx", "run")))
    assert own == result(program, "--opt-level", "O1")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_on_the_same_batches_train_as_one_does():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    options = ("--opt-level", "O1", "--epochs", "1", "--distributed", "--sync_bn")
    first, second = finish(*(start("image_classification", *options, RANK=rank, **common) for rank in ("0", "1")))
    assert first == second
    alone = result("image_classification", "--opt-level", "O1", "--epochs", "1")
    assert first["losses"][0] == pytest.approx(alone["losses"][0], rel=16 * 2.0**-11)
    assert statistics.fmean(last_quarter(first["losses"])) == pytest.approx(
        statistics.fmean(last_quarter(alone["losses"])), abs=noise(alone["losses"])
    )


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.py")), ids=lambda path: path.stem)
def test_programs_know_nothing_of_ampx(path):
    text = path.read_text()
    assert not re.search("ampx", text)
    assert "from apex" in text
