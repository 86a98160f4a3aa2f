"""Two workers, a server and a scheduler of a store on this machine; the tests judge what the workers wrote.

What is right is arithmetic: the gradients are the slopes of linear losses, and the workers' are added up.
"""

import json
import pathlib
import socket

import pytest

import ampx
import processes
from ampx.backend import CastPlan
from ampx_mxnet.backend import MXNetBackend
from ampx_mxnet.compat import mx
from ampx_mxnet.wrapping import make_wrapper

pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def run_workers(folder, *arguments):
    """Run two workers with these arguments; return what reads both's records of a scenario."""
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_INTERFACE": "lo",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    roles = ("scheduler", "server", "worker", "worker")
    ended = processes.finish(
        [processes.Started([WORKER, folder, *arguments], DMLC_ROLE=role, **common) for role in roles]
    )

    def read(scenario):
        rows = []
        for rank in range(2):
            path = folder / f"{rank}.json"
            seen = json.loads(path.read_text()) if path.exists() else {}
            assert scenario in seen, f"worker {rank} wrote nothing:\n" + "\n".join(
                process.stderr[-1500:] for process in ended
            )
            rows.append(seen[scenario])
        return rows

    return read


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return run_workers(tmp_path_factory.mktemp("workers"))


def applied(gradient, *scales):
    return [True, [gradient, gradient], list(scales)]


def skipped(*scales):
    return [False, [0.0, 0.0], list(scales)]


def test_an_overflow_on_one_worker_makes_both_skip_and_the_first_step_keeps_the_weights(records, covers):
    for record in records("steps"):
        assert record == [applied(3.0, 2.0**16), skipped(2.0**15), applied(3.0, 2.0**15)]
    covers("distributed", "mxnet", "cpu/float32/O0")


def test_unscale_and_clip_see_the_workers_sum_once(records):
    for gradient, norm, step in records("unscaled"):
        assert gradient == [3.0, 3.0]
        assert norm == pytest.approx(18**0.5, rel=1e-6)  # some roundings of float32
        assert step == applied(3.0, 2.0**15)


def test_nothing_is_added_to_the_workers_sum_which_would_be_added_up_again(records):
    for message, step in records("by_hand"):
        assert "after allreduce_grads" in message
        assert step == applied(3.0, 2.0**15)


def test_the_sum_over_workers_may_overflow(records):
    for step in records("sum_overflows"):
        assert step == skipped(2.0**14)


def test_scales_of_several_losses_stay_equal_where_one_worker_knows_which_overflowed(records):
    for record in records("losses"):
        assert record == [
            applied(6.0, 2.0**14, 2.0**16),
            skipped(2.0**13, 2.0**15),
            applied(6.0, 2.0**13, 2.0**15),
        ]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "level"), [("float32", "O0"), *(("float16", level) for level in ("O1", "O2", "O3"))])
def test_workers_with_gpus_add_up_and_skip_alike(dtype, level, tmp_path, covers):
    if not mx.context.num_gpus():
        pytest.skip("no CUDA device for mxnet")
    scale = 2.0**10  # times a slope of 3 it is within float16
    for record in run_workers(tmp_path, level)("products"):
        assert record == [applied(3.0, scale), skipped(scale / 2), applied(3.0, scale / 2)]
    covers("distributed", "mxnet", f"gpu/{dtype}/{level}")


# -- what stores cannot do: refused before anything is trained -------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_servers_know_no_bfloat16_parameters(level, amp, weights, record_property):
    """Before they are asked: a server that is pushed such an array ends, and its workers wait for ever."""
    raw = mx.gluon.Trainer([weights(1.0)], "sgd", kvstore="dist_sync")
    member = amp.wrap_optimizer(mx.gluon.Trainer([weights(1.0)], "sgd")).ampx_member
    with pytest.raises(ampx.UnsupportedByBackendError, match="no arrays") as refusal:
        make_wrapper(MXNetBackend(), raw, member, {"plan": CastPlan("cpu", "bfloat16", level)})
    record_property("ampx.refused", ["mxnet", f"cpu/bfloat16/{level}/distributed", str(refusal.value)])
    assert raw._kvstore_params["update_on_kvstore"] is None


@pytest.mark.parametrize(
    ("store", "contexts"), [("device", [mx.cpu(0), mx.cpu(1)]), ("dist_sync", [mx.cpu()])], ids=["contexts", "workers"]
)
def test_compressed_gradients_are_refused(store, contexts, amp, weights):
    """MXNet rounds scaled gradients to its threshold, infinities too: a step of 2e-6 where 0.25 is right."""
    compression = {"type": "2bit", "threshold": 0.5}
    raw = mx.gluon.Trainer([weights(1.0, ctx=contexts)], "sgd", kvstore=store, compression_params=compression)
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"compression_params.*Leave it out"):
        amp.wrap_optimizer(raw)
    assert amp.state_dict()["groups"] == []
