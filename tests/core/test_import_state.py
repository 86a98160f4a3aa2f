"""States that other libraries save, read and then continued beside a copy of that library's own rule.

Each rule is written here from the library's source, in its own words; ampx must take the same decisions from
the same dictionary.
"""

import copy
import json
import math
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

import ampx
from ampx import InvalidStateError, UnknownSchemaError
from ampx.saved_state import parse_state


class Array:
    """What numpy, torch and jax arrays have in common here."""

    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value


APEX = {"loss_scaler0": {"loss_scale": 16384.0, "unskipped": 1995}}
TORCH = {
    "scale": 2.0**20,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 5,
    "_growth_tracker": 3,
}
PADDLE = {
    "scale": Array([1024.0]),
    "incr_ratio": 2.0,
    "decr_ratio": 0.5,
    "incr_every_n_steps": 4,
    "decr_every_n_nan_or_inf": 3,
    "incr_count": 0,
    "decr_count": 1,
    "use_dynamic_loss_scaling": True,
}
KERAS = {"dynamic_scale": Array(8192.0), "step_counter": Array(2), "dynamic_growth_steps": 4}
FLAX = {"fin_steps": Array(2), "scale": Array(2048.0), "growth_interval": 3}
DEEPSPEED = {
    "dynamic_loss_scale": True,
    "cur_scale": 65536.0,
    "cur_iter": 10,
    "last_overflow_iter": 7,
    "scale_factor": 2.0,
    "scale_window": 4,
}
TF1 = {"current_loss_scale": Array(512.0), "good_steps": Array(1), "increment_period": 3, "multiplier": 2.0}


def apex(d, overflow, interval=2000):
    d = d["loss_scaler0"]
    if overflow:
        d["loss_scale"], d["unskipped"] = d["loss_scale"] / 2, 0
    else:
        d["unskipped"] += 1
    if d["unskipped"] == interval:
        d["loss_scale"], d["unskipped"] = min(2.0**24, d["loss_scale"] * 2), 0
    return d["loss_scale"]


def torch(d, overflow):
    if overflow:
        d["scale"], d["_growth_tracker"] = d["scale"] * d["backoff_factor"], 0
    else:
        d["_growth_tracker"] += 1
        if d["_growth_tracker"] == d["growth_interval"]:
            d["scale"], d["_growth_tracker"] = d["scale"] * d["growth_factor"], 0
    return d["scale"]


def paddle(d, overflow):
    scale = d["scale"].value
    if overflow:
        d["incr_count"], d["decr_count"] = 0, d["decr_count"] + 1
        if d["decr_count"] == d["decr_every_n_nan_or_inf"]:
            scale[0], d["decr_count"] = scale[0] * d["decr_ratio"], 0
    else:
        d["decr_count"], d["incr_count"] = 0, d["incr_count"] + 1
        if d["incr_count"] == d["incr_every_n_steps"]:
            scale[0], d["incr_count"] = scale[0] * d["incr_ratio"], 0
    return scale[0]


def keras(d, overflow):
    scale, counter = d["dynamic_scale"], d["step_counter"]
    if overflow:
        counter.value, scale.value = 0, scale.value * 0.5
    elif counter.value == d["dynamic_growth_steps"] - 1:
        counter.value, scale.value = 0, scale.value * 2.0
    else:
        counter.value += 1
    return scale.value


def flax(d, overflow):
    steps, scale = d["fin_steps"], d["scale"]
    grow = steps.value == d["growth_interval"]  # compared before it counts this step
    if overflow:
        scale.value *= 0.5
    elif grow:
        scale.value *= 2.0
    steps.value = 0 if grow or overflow else steps.value + 1
    return scale.value


def deepspeed(d, overflow):
    if overflow:
        d["cur_scale"], d["last_overflow_iter"] = max(d["cur_scale"] / 2, 1), d["cur_iter"]
    else:
        stable = d["cur_iter"] - d["last_overflow_iter"] - 1
        if stable > 0 and stable % d["scale_window"] == 0:
            d["cur_scale"] *= 2
    d["cur_iter"] += 1
    return d["cur_scale"]


def tf1(d, overflow):
    scale, good = d["current_loss_scale"], d["good_steps"]
    if overflow:
        good.value, scale.value = 0, max(scale.value / d["multiplier"], 1)
    elif good.value + 1 >= d["increment_period"]:
        good.value, scale.value = 0, scale.value * d["multiplier"]
    else:
        good.value += 1
    return scale.value


def continued(saved, pattern):
    """Import, and go on in ampx."""
    ((config, states),) = parse_state(json.loads(json.dumps(ampx.import_state(saved))))
    state, scales = states[0], []
    for overflow in pattern:
        state = ampx.next_state(config, state, not overflow)
        scales.append(state.scale)
    return scales


PATTERNS = ["0000000000", "1000000000", "0100000001", "1110001110", "0001000010000100001", "1101101101111"]
FORMATS = [(APEX, apex), (TORCH, torch), (PADDLE, paddle), (KERAS, keras), (TF1, tf1)]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("saved", "rule"), FORMATS, ids=lambda value: getattr(value, "__name__", ""))
def test_training_goes_on_as_the_library_would_have(saved, rule, pattern):
    overflows = [bit == "1" for bit in pattern]
    theirs = copy.deepcopy(saved)
    assert continued(saved, overflows) == [rule(theirs, overflow) for overflow in overflows]


@pytest.mark.parametrize("fin_steps", range(4))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flax_grows_one_step_later_than_its_interval_says(pattern, fin_steps):
    saved = {**FLAX, "fin_steps": Array(fin_steps)}
    overflows = [bit == "1" for bit in pattern]
    theirs = copy.deepcopy(saved)
    assert continued(saved, overflows) == [flax(theirs, overflow) for overflow in overflows]


@pytest.mark.parametrize("since", range(-1, 14))
def test_deepspeed_grows_when_it_would_have_wherever_the_checkpoint_was_taken(since):
    # Its first growth comes after window + 1 good steps, then (without an overflow) every window steps; ampx has one
    # interval. What follows an overflow is what training meets, so that is kept exactly, and so is the next growth.
    saved = {**DEEPSPEED, "cur_iter": 20, "last_overflow_iter": 20 - 1 - max(since, 0)}
    theirs = copy.deepcopy(saved)
    scales = [deepspeed(theirs, False) for _ in range(5)]
    until_growth = scales.index(131072.0) + 1
    assert continued(saved, [False] * until_growth) == scales[:until_growth]
    overflows = [False] * until_growth + [True] + [False] * 5 + [True, True] + [False] * 5
    theirs = copy.deepcopy(saved)
    assert continued(saved, overflows) == [deepspeed(theirs, overflow) for overflow in overflows]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_deepspeed_hysteresis_left_is_used_up_first(left):
    saved = {**DEEPSPEED, "cur_hysteresis": left, "delayed_shift": 3}
    assert continued(saved, [True] * left) == [65536.0] * (left - 1) + [32768.0]


SCALER = {**{key: DEEPSPEED[key] for key in DEEPSPEED if key != "dynamic_loss_scale"}, "cur_hysteresis": 1}
SCALER_OBJECT = SimpleNamespace(
    **SCALER, min_scale=1, delayed_shift=1, consecutive_hysteresis=False, dynamic=True, raise_error_at_min_scale=True
)


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param({**DEEPSPEED, "optimizer_state_dict": {"state": {}}, "clip_grad": 0.0}, id="fp16-optimizer"),
        pytest.param({"loss_scaler": SCALER, "overflow": False}, id="loss-scaler-fields"),
        pytest.param({"loss_scaler": SCALER_OBJECT, "dynamic_loss_scale": True}, id="loss-scaler-object"),
        pytest.param({"optimizer_state_dict": {"loss_scaler": SCALER_OBJECT}, "ds_version": "0"}, id="zero-file"),
        pytest.param({"optimizer": DEEPSPEED, "module": {}}, id="engine-checkpoint"),
        pytest.param({"optimizer": {"loss_scaler": SCALER_OBJECT}, "module": {}}, id="engine-checkpoint-zero"),
    ],
)
def test_deepspeed_is_found_where_it_stores_its_scaler(saved):
    theirs = copy.deepcopy(DEEPSPEED)
    overflows = [False] * 3 + [True] + [False] * 5
    assert continued(saved, overflows) == [deepspeed(theirs, overflow) for overflow in overflows]


@pytest.mark.parametrize(
    "saved",
    [
        {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 5},
        {"loss_scaler": SimpleNamespace(cur_scale=128.0, dynamic=False)},
        {**PADDLE, "scale": Array([128.0]), "use_dynamic_loss_scaling": False},
    ],
)
def test_a_static_scale_stays_static(saved):
    assert continued(saved, [True, False] * 5) == [128.0] * 10


@pytest.mark.parametrize(
    "saved",
    [
        {"loss_scale_optimizer/step_counter": Array(2), "loss_scale_optimizer/dynamic_scale": Array(8192.0)},
        {"step_counter:0": Array([2]), "dynamic_scale:0": Array([8192.0])},
        {"0": Array(17), "1": Array(0.1), "2": Array(2), "3": Array(8192.0), "4": Array([[1.0, 2.0]])},
        [
            SimpleNamespace(path="sgd/iteration", tolist=lambda: 17),
            SimpleNamespace(path="loss_scale_optimizer/step_counter", tolist=lambda: 2),
            SimpleNamespace(path="loss_scale_optimizer/dynamic_scale", tolist=lambda: 8192.0),
        ],
    ],
    ids=["paths", "names", "positions", "variables"],
)
def test_keras_optimizer_variables(saved):
    ((config, states),) = parse_state(ampx.import_state(saved))
    assert config.growth_interval == 2000
    assert (states[0].scale, states[0].growth_tracker) == (8192.0, 2)


def test_apex_keeps_every_loss_and_widens_the_bounds_for_all():
    saved = {f"loss_scaler{key}": {"loss_scale": 2.0**key, "unskipped": key} for key in (26, 2, 10)}
    ((config, states),) = parse_state(ampx.import_state(saved))
    numbers = {key: (state.scale, state.growth_tracker) for key, state in states.items()}
    assert numbers == {2: (4.0, 2), 10: (1024.0, 10), 26: (2.0**26, 26)}
    assert config.max_scale == 2.0**26


def test_a_state_of_ampx_passes_through_checked():
    saved = ampx.import_state(TORCH)
    assert ampx.import_state(saved) == saved
    saved["groups"][0]["losses"][0]["scale"] = -1
    with pytest.raises(InvalidStateError):
        ampx.import_state(saved)


@pytest.mark.parametrize(
    "saved", [{}, None, [], [1, 2], "state", 5, {"scale": 4.0}, {"model": {}}, {"schema": "ampx.loss_scale/9"}]
)
def test_what_no_library_saved_is_refused(saved):
    with pytest.raises(UnknownSchemaError, match="accepted") as caught:
        ampx.import_state(saved)
    assert type(caught.value) is UnknownSchemaError


def test_the_state_of_a_scaler_that_is_off_is_named():
    with pytest.raises(UnknownSchemaError, match="switched off"):
        ampx.import_state({})


def test_a_large_checkpoint_is_not_printed_whole():
    with pytest.raises(UnknownSchemaError) as caught:
        ampx.import_state({f"layer{number}.weight": 0 for number in range(10_000)})
    assert len(str(caught.value)) < 1000


def spoiled():
    numbers = {
        "apex": (APEX, ("loss_scaler0", "loss_scale"), ("loss_scaler0", "unskipped")),
        "torch": (TORCH, ("scale",), ("growth_factor",), ("backoff_factor",), ("growth_interval",)),
        "tracker": (TORCH, ("_growth_tracker",)),
        "paddle": (PADDLE, ("scale",), ("incr_ratio",), ("decr_ratio",), ("incr_count",), ("decr_count",)),
        "intervals": (PADDLE, ("incr_every_n_steps",), ("decr_every_n_nan_or_inf",)),
        "keras": (KERAS, ("dynamic_scale",), ("step_counter",)),
        "flax": (FLAX, ("scale",), ("fin_steps",)),
        "deepspeed": (DEEPSPEED, ("cur_scale",), ("scale_factor",), ("scale_window",)),
        "iterations": (DEEPSPEED, ("cur_iter",), ("last_overflow_iter",)),
        "tf1": (TF1, ("current_loss_scale",), ("good_steps",)),
    }
    bad = [math.nan, math.inf, "4", True, None, [], [1, 2], b"12", Array("4"), Array([True]), Array([[]]), object()]
    for name, (saved, *paths) in numbers.items():
        for path in paths:
            for value in bad:
                wrong = copy.deepcopy(saved)
                place = wrong[path[0]] if len(path) > 1 else wrong
                place[path[-1]] = value
                shown = f"Array({value.value})" if isinstance(value, Array) else repr(value)[:9]
                yield pytest.param(wrong, id=f"{name}-{path[-1]}-{shown}")


@pytest.mark.parametrize("saved", list(spoiled()))
def test_a_spoiled_value_is_refused(saved):
    with pytest.raises(InvalidStateError) as caught:
        ampx.import_state(saved)
    assert type(caught.value) is InvalidStateError


@pytest.mark.parametrize(
    "saved",
    [
        {key: value for key, value in TORCH.items() if key != "scale"},
        {key: value for key, value in TORCH.items() if key != "growth_interval"},
        {key: value for key, value in PADDLE.items() if key != "scale"},
        {key: value for key, value in PADDLE.items() if key != "decr_count"},
        {"dynamic_scale": 8.0},
        {"fin_steps": 3},
        {"cur_scale": 8.0},
        {"current_loss_scale": 8.0},
        {"loss_scaler0": {"loss_scale": 8.0}},
        {"loss_scaler0": 8.0},
        {"loss_scaler0": None},
        {**DEEPSPEED, "scale_factor": 0},
        {**DEEPSPEED, "scale_window": 0},
        {**DEEPSPEED, "last_overflow_iter": 11},
        {**DEEPSPEED, "cur_hysteresis": 0, "delayed_shift": 0},
        {**DEEPSPEED, "dynamic_loss_scale": "False"},
        {**PADDLE, "use_dynamic_loss_scaling": "False"},
        {**TORCH, "scale": -4.0},
        {**TORCH, "scale": 0.0},
        {**TORCH, "scale": 1e-45},
        {**TORCH, "_growth_tracker": -1},
        {**TORCH, "growth_factor": 0.5},
    ],
)
def test_missing_and_absurd_values_are_refused(saved):
    with pytest.raises(InvalidStateError):
        ampx.import_state(saved)


# -- whatever the input --------------------------------------------------------------------------------


class Hostile:
    """Raises in every question that can be asked of a value."""

    def _raise(self, *_):
        raise ZeroDivisionError("asked")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __repr__ = __str__ = __len__ = _raise
    __iter__ = __getitem__ = __getattr__ = __float__ = __int__ = __index__ = __contains__ = __hash__ = _raise


class HostileDict(dict):
    """A dictionary whose entries cannot be read."""

    def _raise(self, *_):
        raise OSError("the file behind it is closed")

    get = keys = items = __iter__ = __getitem__ = _raise


class HostileFloat(float):
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = Hostile._raise
    __hash__ = float.__hash__


class NoElement:
    """An array of no elements, as far as comparisons and truth go."""

    def __eq__(self, other):
        return self

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = object.__hash__

    def __bool__(self):
        raise ValueError("the truth of an empty array is ambiguous")

    def tolist(self):
        return []


class Meta:
    """A tensor without data."""

    def tolist(self):
        raise NotImplementedError("no data")

    __bool__ = __float__ = tolist


def deep(depth, leaf=1.0):
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


def hostile_values():
    return [
        10**400,
        -(10**400),
        10**6000,
        deep(5000),
        deep(5000, "x"),
        {"scale": deep(5000)},
        Hostile(),
        HostileDict(a=1),
        HostileFloat(4.0),
        NoElement(),
        Meta(),
        Array(Hostile()),
        Array(deep(5000)),
        Array(10**400),
        b"\xff",
        "x" * 100_000,
        1j,
        ...,
        float("nan"),
    ]


def all_fields():
    """Every entry of every format, the state of ampx included."""
    own = ampx.import_state(TORCH)
    for name, saved in {
        **dict(
            zip(
                ["apex", "torch", "paddle", "keras", "tf1", "flax", "deepspeed", "ampx"],
                [
                    APEX,
                    TORCH,
                    PADDLE,
                    KERAS,
                    TF1,
                    FLAX,
                    {**DEEPSPEED, "cur_hysteresis": 1, "delayed_shift": 1},
                    own,
                ],
                strict=True,
            )
        )
    }.items():
        yield from ((name, saved, path) for path in paths_in(saved))


def paths_in(value, before=()):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*before, key)
        yield from paths_in(inner, (*before, key))


def replaced(saved, path, value):
    copied = copy.deepcopy(saved)
    place = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


def check_import(data):
    """A state or one of the two errors; an error that can be printed, a state that JSON can hold and that loads."""
    try:
        state = ampx.import_state(data)
    except (UnknownSchemaError, InvalidStateError) as error:
        message = str(error)
    else:
        message = ""
        assert parse_state(json.loads(json.dumps(state, allow_nan=False))) == parse_state(state)
    assert len(message) < 1500


@pytest.mark.parametrize(
    ("name", "saved", "path"),
    [pytest.param(*case, id="-".join(map(str, (case[0], *case[2])))) for case in all_fields()],
)
def test_a_hostile_value_in_any_field_is_refused_by_the_documented_errors(name, saved, path):
    for value in hostile_values():
        check_import(replaced(saved, path, value))


def test_a_hostile_value_instead_of_a_state_is_refused_by_the_documented_errors():
    for value in hostile_values():
        for data in (value, [value], {"scale": value}, {"optimizer": value}, {"loss_scaler": value}, {"schema": value}):
            check_import(data)
        with pytest.raises(UnknownSchemaError):
            parse_state({"schema": value})
    with pytest.raises(ampx.StateError):
        parse_state(HostileDict(schema="ampx.loss_scale/1"))


def test_a_hostile_key_is_refused_by_the_documented_errors():
    nested = ()
    for _ in range(5000):
        nested = (nested,)
    keys = [10**6000, nested, float("nan"), None, "x" * 100_000]
    for key in keys:
        check_import({key: 1.0})
        check_import({**TORCH, key: 1.0})


JSON_LIKE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.integers(0, len(hostile_values()) - 1).map(lambda index: hostile_values()[index]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
CASES = list(all_fields())


@given(case=st.sampled_from(CASES), value=JSON_LIKE, wrap=st.sampled_from([lambda x: x, Array, lambda x: [x]]))
def test_any_value_in_any_field_gives_a_state_that_loads_or_a_documented_error(case, value, wrap):
    _, saved, path = case
    check_import(replaced(saved, path, wrap(value)))


@given(data=JSON_LIKE, keys=st.lists(st.sampled_from(sorted({path[-1] for _, _, path in CASES}, key=str)), max_size=4))
def test_any_value_gives_a_state_that_loads_or_a_documented_error(data, keys):
    check_import(data)
    check_import(dict.fromkeys(keys, data))


def test_the_configuration_of_a_loss_scale_refuses_numbers_too_large_to_print():
    digits = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else 4300
    for value in (10**400, 10 ** (digits + 1)):
        with pytest.raises(ampx.InvalidOptionError):
            ampx.LossScale(init_scale=value)
        with pytest.raises(ampx.InvalidOptionError):
            ampx.LossScale(growth_interval=value)
