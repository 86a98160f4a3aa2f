"""What the backends' `watch` and `force` have in common: who stands around calls, names, and numbers to be read."""

import math

import numpy as np
import pytest

import ampx
from ampx.backend import CastPlan, is_module
from ampx.modules import FORCES, GRADIENTS, WATCHERS, CallInterceptors, Names, last_match, module_dtypes
from ampx.numerics.overflow import OverflowTrace
from ampx.numerics.probe import Reading, Stats, Watching
from ampx.numerics.rounding import describe
from ampx.numerics.watching import NUMBERS, GradientLog, Log, combined
from toy.framework import Dense, Module, Tensor
from toy.harness import ImplicitToyHarness


class Noting:
    """Notes that it stands around a call."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def call(self, module, forward, inputs, options):
        self.notes.append(self.name)
        return [*forward(*inputs, **options), self.name]


@pytest.fixture
def notes():
    return []


@pytest.fixture
def calls(notes):
    return CallInterceptors(lambda: notes.append("install"), lambda: notes.append("uninstall"))


def test_who_watches_stands_outside_of_who_forces(calls, notes):
    force, watch, gradient = (Noting(name, notes) for name in ("force", "watch", "gradient"))
    with calls.around((FORCES, force)), calls.around((WATCHERS, watch), (GRADIENTS, gradient)):
        assert calls.run(None, lambda x, y: [x + y], 1, y=2) == [3, "force", "watch", "gradient"]
        assert calls.run(None, lambda: []) == ["force", "watch", "gradient"]
    assert notes == ["install", *["gradient", "watch", "force"] * 2, "uninstall"]


def test_the_last_of_a_rank_stands_innermost(calls, notes):
    with calls.around((FORCES, Noting("first", notes))), calls.around((FORCES, Noting("second", notes))):
        assert calls.run(None, lambda: []) == ["second", "first"]


def test_calls_are_put_back_after_an_exception(calls, notes):
    with pytest.raises(KeyError), calls.around((FORCES, Noting("a", notes))):
        raise KeyError
    assert notes == ["install", "uninstall"]
    assert calls.run(None, lambda: [7]) == [7]


def weight():
    return Tensor([1.0], parameter=True)


def test_modules_are_named_within_their_model():
    shared = Dense(weight())
    model = Module(a=shared, b=Module(c=Dense(weight()), again=shared))
    names = Names(model, Module.named_modules)
    b = model.modules["b"]
    assert [names.of(module) for module in (model, shared, b, b.modules["c"])] == ["", "a", "b", "b.c"]
    assert names.of(Dense(weight())) is None


def test_without_a_model_the_second_that_is_called_has_a_prefix():
    first, second = Module(a=Dense(weight())), Module(a=Dense(weight()))
    names = Names(None, Module.named_modules)
    called = (first, first.modules["a"], second, second.modules["a"], first)
    assert [names.of(module) for module in called] == ["", "a", "Module:", "Module:a", ""]


def test_a_model_takes_the_place_of_a_part_that_was_called_before_it():
    part, other = Dense(weight()), Dense(weight())
    model = Module(a=part, b=Dense(weight()))
    names = Names(None, Module.named_modules)
    called = (part, other, model, model.modules["b"], other)
    assert [names.of(module) for module in called] == ["", "Dense:", "", "b", "Dense:"]


def test_models_of_one_class_have_names_of_their_own():
    models = [Module(a=Dense(weight())) for _ in range(4)]
    other = Dense(weight())
    names = Names(None, Module.named_modules)
    called = [names.of(part) for model in (models[0], other, *models[1:]) for part in (model, *model.modules.values())]
    assert called == ["", "a", "Dense:", "Module:", "Module:a", "Module#2:", "Module#2:a", "Module#3:", "Module#3:a"]


def test_a_wrapper_has_the_name_of_what_it_wraps():
    inner, wrapper, added = Dense(weight()), object(), []
    names = Names(None, lambda root: [("", inner if root is wrapper else root)], added.extend)
    assert [names.of(module) for module in (Dense(weight()), wrapper, inner)] == ["", "Dense:", "Dense:"]
    assert added[1] == ("Dense:", inner)


def test_a_pattern_that_matches_nothing_is_refused_where_the_model_is_known():
    names = Names(Module(a=Dense(weight())), Module.named_modules)
    names.check(["a", "*", ""], "watch")
    with pytest.raises(ampx.UnsupportedOpError, match=r"watch got the pattern 'b\*'.*'', 'a'\. Correct it"):
        names.check(["a", "b*"], "watch")
    Names(None, Module.named_modules).check(["b*"], "watch")


@pytest.mark.parametrize(("name", "dtype"), [("a.b", "float16"), ("a.c", "bfloat16"), ("a", None), ("b", "float32")])
def test_the_last_pattern_that_matches_holds(name, dtype):
    assert last_match(name, {"a.*": "bfloat16", "?": "float32", "*b": "float16", "[b]": "float32", "a": None}) == dtype


def test_entries_for_modules_are_told_from_operations():
    plan = CastPlan("cpu", "bfloat16", allow=("mul", "module:a*", abs, "module:c"), deny=("module:a*", "exp"))
    assert [is_module(entry) for entry in plan.allow] == [False, True, False, True]
    assert module_dtypes(plan) == {"a*": "float32", "c": "bfloat16"}


def numbers(values):
    """Return what a backend would: no such element is infinity."""
    stats = describe(values)
    read = {**vars(stats), "smallest": stats.smallest or math.inf}
    read["lowest"] = stats.lowest if stats.elements > stats.nonfinite else math.inf
    return stats.elements, [float(read[name]) for name in NUMBERS]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [[]],
        [[0.0, 0.0]],
        [[math.inf, math.nan]],
        [[1.0, -2.0], [], [math.nan]],
        [[1e-9, 7e4], [-7e4, 0.0], [math.inf, 3.0]],
        [[5.0], [2.0, 3.0]],
    ],
)
def test_several_tensors_count_as_all_their_elements(parts):
    assert combined([numbers(part) for part in parts]) == describe([value for part in parts for value in part])


def test_a_log_counts_calls_by_direction_and_leaves_out_what_never_came():
    brought = []

    def read(device):
        brought.append(len(device))
        return list(device)

    log = Log(Watching(modules=("a*",), samples=3), read, list)
    assert [log.watching.watches(name) for name in ("a", "a.b", "b", "")] == [True, True, False, False]
    for values in ([1.0, -3.0], [math.inf]):
        entry = log.add("a", "Dense", "", "forward", [len(values), 5])
        entry.dtype = "float16"
        entry.value.append(numbers(values))
        entry.inputs += [numbers([2.0]), numbers([4.0, 8.0])]
        flat = [np.float32(values), np.float32([7.0, 8.0, 9.0, 10.0, 11.0])]
        entry.samples |= {place: entry.chosen(place, flat[place], flat[place].size) for place in (1, 0)}
        log.add("a", "Dense", "", "backward")
    first, second = log.readings()
    assert brought == [6]  # all at once
    assert (first.call, second.call, first.seconds, first.place) == (0, 1, None, "")
    assert second.value == Stats(elements=1, nonfinite=1)
    assert first.inputs == describe([2.0, 4.0, 8.0])
    np.testing.assert_array_equal(first.sample, np.float32([1.0, 8.0, 11.0]))  # every third of seven
    np.testing.assert_array_equal(second.sample, np.float32([math.inf, 8.0, 10.0]))  # every second of six


def test_gradients_of_one_backward_pass_are_one_reading():
    gradients = GradientLog(Log(Watching(), list, list), "a", "Dense", sizes=[2, 1])
    first = gradients.at(1)
    assert first.direction == "backward"
    assert gradients.at(0) is first
    assert gradients.at(0) is not first  # another pass comes by


def test_gradients_that_came_in_any_order_are_sorted_between_values_of_a_forward_pass():
    log = Log(Watching(), list, list)
    first, second, third = (GradientLog(log, name, "Dense") for name in ("a", "b", "a"))

    def come(entry, value):
        entry.dtype, entry.value = "float32", [numbers([value])]

    for gradients, value in ((second, 2.0), (first, 1.0), (third, 3.0)):
        come(gradients.at(0), value)
    come(log.add("c", "Dense", "", "forward"), 4.0)
    for gradients, value in ((first, 5.0), (third, 6.0)):
        come(gradients.at(0), value)
    log.sort()
    readings = [(reading.module, reading.call, reading.value.largest) for reading in log.readings()]
    backward = [("a", 0, 3.0), ("b", 0, 2.0), ("a", 1, 1.0)]
    assert readings == [*backward, ("c", 0, 4.0), ("a", 2, 6.0), ("a", 3, 5.0)]


def test_without_patterns_every_module_is_watched():
    assert Watching().watches("any")


class Seen:
    """A watch that has seen some values."""

    def __init__(self, *readings):
        self._readings = list(readings)

    def readings(self):
        return self._readings


def reading(module, value, inputs, direction="forward"):
    return Reading(module, "Dense", "", direction, 0, "float16", describe(value), describe(inputs))


def test_an_overflow_is_told_with_where_it_came_from():
    fine, behind = reading("a", [1.0], [1.0]), reading("b", [math.inf], [1.0], "backward")
    assert str(OverflowTrace(Seen(fine, behind))) == "no module's output overflowed"
    trace = OverflowTrace(Seen(fine, reading("", [math.inf, 1.0], [3.5, 2.0]), reading("b", [math.nan], [1.0])))
    assert str(trace) == (
        "(the model) (Dense): 1 of 2 outputs in float16 are not finite; its inputs were finite, "
        "the largest finite one being 3.5"
    )
    carried = OverflowTrace(Seen(reading("c", [math.nan], [math.inf, 2.0])))
    assert "its inputs were not finite either" in str(carried)


@pytest.mark.usefixtures("toys")
def test_an_overflow_is_traced_while_the_region_lasts():
    ampx.init("toy", dtype="float16")
    model, run, names = ImplicitToyHarness().chain([1.0, 2.0**10, 1.0], [2.0**10])
    with ampx.trace_overflow(model) as trace:
        assert trace.first is None
        run(model)
        assert (trace.first.module, trace.first.dtype) == (names[1], "float16")
    with ampx.trace_overflow(model) as after:
        pass
    run(model)
    assert after.first is None
