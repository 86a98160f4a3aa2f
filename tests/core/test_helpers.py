"""What core offers to backends: trees, devices, instruction sets, and delegation to a raw optimizer."""

import collections
import copy
import pathlib
import types

import numpy as np
import pytest

import ampx
from ampx import backend
from ampx.backend import Device, Forcing, choose_device, cpu_flags, leaves, map_leaves, offer, reject_unknown
from ampx.cli.demo import Demo
from ampx.numerics.probe import Probe
from ampx.optimizer import check_bound, delegate
from ampx.run import Automation
from ampx.shipping.converter import Converter

Pair = collections.namedtuple("Pair", "first second")
TREE = {"a": [1, (2, None)], "b": Pair(3, {"c": 4}), "d": [], "e": collections.OrderedDict(f=5)}


def test_a_mapped_tree_has_the_types_of_the_tree():
    before = copy.deepcopy(TREE)
    mapped = map_leaves(TREE, lambda leaf: None if leaf is None else leaf * 10)
    assert mapped == {"a": [10, (20, None)], "b": Pair(30, {"c": 40}), "d": [], "e": {"f": 50}}
    assert (type(mapped["a"][1]), type(mapped["b"]), type(mapped["e"])) == (tuple, Pair, collections.OrderedDict)
    assert before == TREE


def test_leaves_come_in_the_order_of_the_tree():
    assert list(leaves(TREE)) == [1, 2, None, 3, 4, 5]


@pytest.mark.parametrize("leaf", [None, "text", 7, {1, 2}])
def test_what_is_no_tuple_list_or_dict_is_a_leaf(leaf):
    assert list(leaves(leaf)) == [leaf]
    assert map_leaves(leaf, lambda value: [value]) == [leaf]


@pytest.mark.parametrize(
    ("name", "count", "chosen"),
    [
        ("auto", 0, None),
        ("auto", 2, -1),
        ("cpu", 0, None),
        ("cpu", 2, None),
        ("gpu", 1, -1),
        ("gpu:0", 1, 0),
        ("gpu:1", 2, 1),
    ],
)
def test_a_device_is_chosen_by_its_name(name, count, chosen):
    assert choose_device(name, "Toy", "gpu", count) == chosen


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpu", 0), ("gpu:0", 0), ("gpu:2", 2), ("gpu:-1", 2), ("gpu:x", 2), ("cpu:0", 2), ("cuda", 2), ("", 2), (7, 2)],
)
def test_an_absent_device_is_refused_with_those_that_are_present(name, count):
    with pytest.raises(ampx.UnsupportedDeviceError) as caught:
        choose_device(name, "Toy", "gpu", count)
    message = str(caught.value)
    assert f"device={name!r}" in message
    accepted = message.partition("accepted: ")[2]
    assert [f"'gpu:{number}'" in accepted for number in range(3)] == [number < count for number in range(3)]
    assert ("install a CUDA build of Toy" in message) == (count == 0)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 amx_bf16\nbugs: x\nflags: other\n", {"fpu", "avx2", "amx_bf16"}),
        ("processor: 0\nFeatures: asimd\n", set()),
        ("", set()),
        (None, set()),
    ],
)
def test_instruction_sets_are_those_of_the_first_processor(tmp_path, monkeypatch, text, flags):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="ascii")
    asked = []
    monkeypatch.setattr(backend, "Path", lambda path: asked.append(path) or pathlib.Path(file))
    assert cpu_flags() == flags
    assert asked == ["/proc/cpuinfo"]


def test_an_option_that_a_backend_does_not_know_is_refused_by_name():
    reject_unknown("toy", {"plan": None, "fused": True}, ("fused",))
    with pytest.raises(ampx.InvalidOptionError, match=r"got fuse, .*'toy'.*accepted: loss_scale, fused, max_grad_norm"):
        reject_unknown("toy", {"plan": None, "fuse": True}, ("fused",))


@pytest.mark.parametrize("bound", [0, -1.0, True, "1", float("nan")])
def test_a_bound_is_a_positive_number(bound):
    for accepted in (None, 1, 0.5, np.float32(0.5), np.int64(2)):
        check_bound("max_grad_norm", accepted)
    with pytest.raises(ampx.InvalidOptionError, match="max_grad_norm="):
        check_bound("max_grad_norm", bound)


class Native:
    """An optimizer of a framework."""

    default = 0.5

    def __init__(self):
        self.state = {}

    def _multiply(self, factor):
        return self.default * factor

    @property
    def rate(self):
        return self.state.get("rate", 0.25)

    @rate.setter
    def rate(self, value):
        self.state["rate"] = value


@pytest.fixture
def wrapper():
    """Return a wrapper of a native optimizer."""

    class Wrapper(Native):
        def __init__(self, raw):
            self.raw = raw

    delegate(Wrapper, Native, "raw")
    return Wrapper(Native())


def test_everything_of_the_framework_s_class_is_asked_of_the_raw_optimizer(wrapper):
    raw = wrapper.raw
    raw.default = 2.0
    raw.rate = 4.0
    assert (wrapper.default, wrapper._multiply(3.0), wrapper.rate) == (2.0, 6.0, 4.0)
    assert isinstance(wrapper, Native)


def test_what_is_set_on_a_wrapper_is_set_on_the_raw_optimizer(wrapper):
    wrapper.rate = 8.0
    wrapper.default = 1.0
    assert (wrapper.raw.state, wrapper.raw.default) == ({"rate": 8.0}, 1.0)
    assert set(vars(wrapper)) == {"raw"}
    assert Native.default == 0.5


def test_the_wrapper_s_class_has_what_the_framework_s_has(wrapper):
    kind = type(wrapper)
    assert (kind.default, kind._multiply, kind.rate) == (0.5, Native._multiply, Native.rate)


@pytest.mark.parametrize(
    "call",
    [
        lambda bare: bare.prepare(None, None, backend.CastPlan("cpu", "float16", "O2")),
        lambda bare: bare.activate(None),
        lambda bare: bare.deactivate(None),
        lambda bare: bare.enter_thread(None),
        lambda bare: bare.widest((), "float16"),
        lambda bare: bare.nonfinite_parameters(None, None),
        *(
            lambda bare, contract=contract: offer(bare, contract)
            for contract in (Forcing, Probe, Converter, Automation, Demo)
        ),
        lambda bare: bare.gradients(None),
        lambda bare: bare.zero_gradients(None),
        lambda bare: bare.clip([], 1.0, None),
        lambda bare: bare.check_plan(types.SimpleNamespace(allow=("mul",), deny=())),
    ],
)
def test_a_verb_that_a_backend_does_not_have_refuses(call):
    verbs = dict.fromkeys(ampx.GenericBackend.__abstractmethods__, lambda self, *args: Device("cpu"))
    bare = type("Bare", (ampx.GenericBackend,), {**verbs, "name": "bare", "capabilities": ampx.Capabilities()})()
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"'bare' does not support .*no optional capability"):
        call(bare)
