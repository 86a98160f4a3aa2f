"""The search for the smallest set is exact, and short."""

import math
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import ampx
from ampx.numerics import tune as tuning
from ampx.numerics.batch import Seen
from ampx.numerics.compare import ModuleError
from ampx.numerics.forcing import inside, kept_in_float32
from ampx.numerics.probe import Probe, Reading, Replayed, Stats
from ampx.numerics.ranking import by_error, first_order
from ampx.numerics.timing import fastest, slow_modules
from ampx.numerics.tolerance import Distance, by_rounding, with_joined_gradients
from ampx.numerics.tune_search import (
    NOTHING,
    Kept,
    Search,
    at_fault,
    fails_outside,
    minimal,
    most_runs,
    name_what_fails,
    needed,
    not_faster,
    searched,
)
from ampx.numerics.tuned_policy import Choice, TunedPolicy, in_float32
from toy.framework import Dense, Module, Tensor, casting_state, product, total
from toy.implicit import ImplicitToy
from toy.numerics import ToyProbe

pytestmark = pytest.mark.usefixtures("toys")


class Planted:
    """Passes where all planted names are in the set; counts the calls."""

    def __init__(self, planted):
        self.planted, self.calls = frozenset(planted), 0

    def __call__(self, kept):
        self.calls += 1
        return self.planted <= kept


def most_calls(planted, names):
    return 2 * planted * math.log2(names) + 10


@pytest.mark.parametrize("count", [1, 3, 7])
def test_exactly_the_planted_layers_of_fifty_are_returned_in_few_calls(count):
    names = [f"layer{index}" for index in range(50)]
    for seed in range(200):
        passes = Planted(random.Random(seed).sample(names, count))
        assert minimal(names, passes) == passes.planted
        assert passes.calls <= most_calls(count, 50)


@given(st.data(), st.integers(1, 150))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_the_result_is_exact_whatever_the_order_of_any_number_of_names(data, size):
    names = data.draw(st.permutations([str(index) for index in range(size)]))
    passes = Planted(data.draw(st.sets(st.sampled_from(names), max_size=min(size, 12))))
    assert minimal(names, passes) == passes.planted
    assert passes.calls <= most_calls(max(1, len(passes.planted)), size)


def test_names_at_the_front_are_found_in_few_calls():
    names = [str(index) for index in range(1000)]
    passes = Planted(["0", "1"])
    assert minimal(names, passes) == {"0", "1"}
    assert passes.calls <= 6


def test_nothing_is_needed_where_nothing_fails_and_nothing_helps_where_all_is_not_enough():
    assert minimal(["a", "b"], Planted([])) == frozenset()
    assert minimal(["a", "b"], Planted(["c"])) is None
    assert minimal([], Planted(["c"])) is None


def test_what_is_returned_passes_even_where_more_is_not_always_enough():
    def passes(kept):
        return len(kept) == 8 or {"3", "5"} <= kept

    assert passes(minimal([str(index) for index in range(8)], passes))


class PlantedSearch(Search):
    """Stands for runs that fail unless all planted modules are in float32, or while the loss scale is too large."""

    def __init__(self, modules, planted, largest_scale=math.inf):
        super().__init__(False, [Reading(name, "", "", "forward", 0, "float16", Stats()) for name in modules])
        self.order, self.planted, self.largest_scale, self.scale = modules, set(planted), largest_scale, 2.0**16
        self.says = lambda missing: " and ".join(sorted(missing))

    def compute(self, kept):
        self.runs += 1
        missing = {name for name in self.planted if not any(name == at or inside(name, at) for at in kept.modules)}
        return missing, self.scale > self.largest_scale

    def overflows(self, run):
        return run[1]

    def failure(self, run):
        return "steps are skipped" if run[1] else self.says(run[0])

    look = smallest_operations = failing_operations = policy_fields = hopeless = slow = times = beginning = None
    fails_rounded = None


PlantedSearch.__abstractmethods__ = frozenset()


class ShieldedSearch(PlantedSearch):
    """Stands for runs in which `mul` squares between `first` and `second`, and overflows unless float32 reaches it."""

    def __init__(self, module="", cures=("module:first", "module:norm", "mul"), others=()):
        super().__init__(["first", "norm", "second", *others], others)
        self.dtype, self.module, self.cures = "float16", module, cures
        self.tolerance, self.loses_digits = by_rounding("float16", Distance(0.0)), False

    def compute(self, kept):
        missing, _ = super().compute(kept)
        return (missing, False) if self.is_wide(kept) else (missing | {"mul"}, False)

    def is_wide(self, kept):
        names = {*(f"module:{name}" for name in kept.modules), *kept.operations}
        return not names.isdisjoint(self.cures)

    def fails_rounded(self, module):
        self.runs += 1
        return self.loses_digits

    def look(self, kept, step):
        wide = kept is None or self.is_wide(kept)
        square = Stats(4, largest=9e4) if wide else Stats(4, nonfinite=4)

        def read(module, value, operation="", dtype="float16"):
            return Reading(module, "Linear", operation, "forward", 0, dtype, value, Stats(4, largest=300.0))

        low = "float32" if wide else "float16"
        readings = (
            read("first", Stats(4, largest=300.0), dtype="float32" if kept and "first" in kept.modules else "float16"),
            read(self.module, square, "mul", low),
            read("second", Stats(4) if wide else Stats(4, nonfinite=4)),
        )
        return Seen(Replayed(1.0 if wide else math.inf, {}, {}), readings)


ShieldedSearch.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("module", "modules", "operations"),
    [("", [], ["mul"]), ("norm", ["norm"], []), ("first", ["first"], []), ("first.inside", ["first"], [])],
)
def test_what_fails_is_kept_and_not_what_only_hands_float32_on_to_it(module, modules, operations):
    search = ShieldedSearch(module)
    assert at_fault(search, Kept(frozenset({"first"}))) == Kept(frozenset(modules), frozenset(operations))
    assert search.hands_on == {}
    if module in ("", "norm"):
        assert search.without == {(modules or operations)[0]: "mul"}
    if operations:
        assert search.reason_of_operation("mul") == "fails in float16, outside of modules; without this entry mul"


def test_an_operation_of_the_module_around_takes_the_place_of_a_layer_in_front():
    search = ShieldedSearch("block", cures=("module:block.first", "mul"))
    search.modules = search.order = ("block.first", "block", "second")
    see = search.look
    search.look = lambda kept, step: replace(
        see(kept, step),
        readings=tuple(
            replace(entry, module=f"block.{entry.module}" if entry.module == "first" else entry.module)
            for entry in see(kept, step).readings
        ),
    )
    assert at_fault(search, Kept(frozenset({"block.first"}))) == Kept(operations=frozenset({"mul"}))
    assert search.reason_of_operation("mul") == "fails in float16, in module 'block'; without this entry mul"


@pytest.mark.parametrize(("outside", "modules"), [(("last",), {"block"}), ((), set())])
def test_the_module_around_that_computes_what_fails_is_kept_unless_it_is_all_of_the_model(outside, modules):
    search = ShieldedSearch("block", cures=("module:block.first", "module:block", "mul"))
    search.modules = search.order = ("block.first", "block", *outside)
    see = search.look
    search.look = lambda kept, step: replace(see(kept, step), readings=see(kept, step).readings[1:])
    kept = at_fault(search, Kept(frozenset({"block.first"})))
    assert (kept.modules, kept.operations) == (modules, frozenset() if modules else {"mul"})


class OutsideSearch(ShieldedSearch):
    """Of the same, where `block` returns a value behind `first`, which is in it, and no operation can be kept."""

    framework = device = "toy"
    beginning = Distance(math.inf)

    def __init__(self, value, cures):
        super().__init__(cures=[f"module:{cures}"])
        self.modules, self.order = ("block.first", "block", "second"), ("second", "block.first", "block")
        self.value = value

    def look(self, kept, step):
        seen = super().look(kept, step)
        first, *rest = seen.readings
        first, block = (replace(first, module=name) for name in ("block.first", "block"))
        return replace(seen, readings=(first, replace(block, value=self.value), *rest))

    def smallest_operations(self):
        return None

    def failing_operations(self, modules):
        return ()

    def policy_fields(self, kept):
        return {"deny": sorted(kept.modules), "reasons": {"dtype": "it agrees"}}


@pytest.mark.parametrize(("largest", "named"), [(300.0, "block.first"), (7.0, "block")])
def test_for_what_fails_outside_of_modules_the_one_that_computed_its_inputs_is_tried(largest, named):
    """`block` hands on what `block.first` has computed, or computes something of it."""
    assert searched(OutsideSearch(Stats(4, largest=largest), named), 0).deny == [named]


def test_a_module_that_only_hands_float32_on_is_said_to_do_so_where_nothing_else_cures():
    search = ShieldedSearch(cures=("module:first",))
    kept = Kept(frozenset({"first"}))
    assert at_fault(search, kept) == kept
    assert search.reason("first", "an error") == ("an error; it is kept for the output of mul, which fails after it")


@pytest.mark.parametrize("loses_digits", [False, True])
def test_a_module_is_kept_for_a_finite_value_that_is_wrong_behind_it_unless_its_own_digits_are_missed(loses_digits):
    search = ShieldedSearch(cures=("module:first",))
    search.loses_digits = loses_digits

    def look(kept, step):
        wide = kept is None or search.is_wide(kept)
        dtype = "float32" if wide else "float16"
        sample = np.full(4, 1.0 if wide else 0.0, np.float32)
        product = Reading("", "", "mul", "forward", 0, dtype, Stats(4), Stats(4), sample=sample, place="a.py:3")
        return Seen(Replayed(1.0 if wide else 0.9, {}, {}), (product,))  # off by less than any loss may be by chance

    search.look = look
    kept = Kept(frozenset({"first"}))
    assert at_fault(search, kept) == kept
    says = {} if loses_digits else {"first": "the output of mul (a.py:3), which fails after it"}
    assert search.hands_on == says


@pytest.mark.parametrize(("operation", "says"), [("_backward_amp_cast", ["first"]), ("mul", [])])
def test_a_module_is_kept_for_a_cast_behind_it_that_is_not_made_with_it(operation, says):
    search = ShieldedSearch(cures=("module:first",))
    see = search.look
    search.look = lambda kept, step: replace(
        see(kept, step),
        readings=tuple(
            replace(entry, operation=entry.operation and operation)
            for entry in see(kept, step).readings
            if not entry.operation or entry.dtype == "float16"
        ),
    )
    kept = Kept(frozenset({"first"}))
    assert at_fault(search, kept) == kept
    assert list(search.hands_on) == says


class SecondHand(ShieldedSearch):
    """Of the same, where the value that fails between them is in float32 whatever is kept: digits were lost before."""

    def __init__(self, module="", direction="forward", wrong=False):
        super().__init__(module, cures=("module:first",))
        self.direction, self.wrong = direction, wrong

    def look(self, kept, step):
        self.runs += 1
        wide = kept is None or self.is_wide(kept)
        exact, low = np.ones(4, np.float32), np.full(4, 1.0 if wide or not self.wrong else 2.0, np.float32)
        first, product, second = super().look(kept, step).readings
        first = replace(first, sample=exact if kept is None else low)
        return Seen(
            Replayed(1.0 if wide else math.inf, {}, {}),
            (first, replace(product, dtype="float32", direction=self.direction, place="a.py:3"), second),
        )


SecondHand.__abstractmethods__ = frozenset()
FAILS_THERE = "an error; without this entry mul; it is kept for the "


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (SecondHand(), f"{FAILS_THERE}output of mul (a.py:3), which fails without it"),
        (SecondHand("norm"), f"{FAILS_THERE}output of mul in module 'norm' (a.py:3), which fails without it"),
        (
            SecondHand("norm", "backward"),
            f"{FAILS_THERE}gradient computed by mul in module 'norm' (a.py:3), which fails without it",
        ),
        (SecondHand("first"), "an error; without this entry mul"),  # it holds what fails
        (SecondHand("first.inside"), "an error; without this entry mul"),
        (SecondHand("norm", wrong=True), "an error; without this entry mul"),  # what it returns is wrong before
    ],
)
def test_the_reason_of_a_module_names_what_fails_first_without_it(search, says):
    kept = Kept(frozenset({"first"}))
    search.without = {"first": search.judged(NOTHING)}
    name_what_fails(search, kept)
    assert search.reason("first", "an error") == says
    assert search.runs == 3  # without it, which was judged, and the looks at that and at float32
    name_what_fails(search, kept)
    assert search.runs == 3


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ("exp", "without this entry mul; it is kept for the output of mul (a.py:3), which fails without it"),
        ("mul", "fails in float16, outside of modules; without this entry mul"),
        ("aten::mul.Tensor", "fails in float16, outside of modules; without this entry mul"),
    ],
)
def test_the_reason_of_an_operation_names_another_that_fails_first_without_it(kept, says):
    search = SecondHand()
    search.without = {kept: search.judged(NOTHING)}
    name_what_fails(search, Kept(operations=frozenset({kept})))
    assert search.reason_of_operation(kept) == says


def test_a_search_says_what_fails_first_without_what_it_keeps():
    class Searched(SecondHand):
        framework = device = "toy"

        def smallest_operations(self):
            return None

        def failing_operations(self, modules):
            return ()

        def policy_fields(self, kept):
            return {"deny": [self.reason(name, "an error") for name in kept.modules], "reasons": {"dtype": "it agrees"}}

    assert searched(Searched("norm"), 0).deny == [
        f"{FAILS_THERE}output of mul in module 'norm' (a.py:3), which fails without it"
    ]


def test_what_fails_first_is_not_looked_for_where_the_runs_are_used_up():
    search = SecondHand()
    search.judged(NOTHING)
    search.runs = most_runs(1, len(search.modules)) - 1
    name_what_fails(search, Kept(frozenset({"first"})))
    assert search.hands_on == {}
    assert search.runs == most_runs(1, len(search.modules)) - 1


def test_each_of_the_others_is_left_out_again_where_one_is_replaced():
    search = ShieldedSearch(others=("last",))
    assert at_fault(search, Kept(frozenset({"first", "last"}))) == Kept(frozenset({"last"}), frozenset({"mul"}))
    assert search.without == {"mul": "mul", "last": "last"}
    superfluous = ShieldedSearch(others=())
    assert at_fault(superfluous, Kept(frozenset({"first", "second"}))) == Kept(operations=frozenset({"mul"}))


def test_a_module_is_not_replaced_where_what_fails_behind_it_is_low_as_before():
    """Its output has lost digits that are missed there: float32 there finds none."""
    search = ShieldedSearch()
    see = search.look
    search.look = lambda kept, step: replace(
        see(kept, step), readings=tuple(replace(entry, dtype="float16") for entry in see(kept, step).readings)
    )
    kept = Kept(frozenset({"first"}))
    assert at_fault(search, kept) == kept
    assert search.hands_on == {}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [8, 50, 300])
def test_the_planted_modules_are_found_and_each_is_shown_to_be_needed_in_few_runs(count, size):
    for seed in range(20):
        names = [f"block{index // 5}.layer{index}" for index in range(size)]
        search = PlantedSearch(names, random.Random(seed).sample(names, count))
        kept = needed(search, search.order)
        assert kept.modules == search.planted
        assert search.without == {name: name for name in search.planted}
        assert search.runs <= most_runs(count, size)


@pytest.mark.parametrize(("planted", "kept"), [(["block.b"], ["block.b"]), (["block"], ["block"]), (["c"], ["c"])])
def test_of_a_block_no_more_is_kept_than_is_needed(planted, kept):
    search = PlantedSearch(["block", "block.a", "block.b", "c"], planted)
    assert needed(search, search.order).modules == set(kept)
    assert (
        list(search.without.values()) == planted if planted != ["block.b"] else search.without["block.b"] == "block.b"
    )


def test_a_block_stays_where_only_several_inside_do_without_it():
    search = PlantedSearch(["block", "block.a", "block.b", "c"], ["block.a", "block.b"])
    assert needed(search, search.order).modules == {"block"}
    assert search.without == {"block": "block.a and block.b"}
    assert search.runs <= most_runs(1, 4)


def test_a_module_takes_the_place_of_the_whole_model_that_does_without_the_rest():
    """What the model computes between its modules is not finite: of it all is tried first, and one module does."""
    search = PlantedSearch([*(f"layer{number}" for number in range(8)), ""], ["layer3"])
    search.order = ["", *(f"layer{number}" for number in range(8))]
    search.tolerance, search.smallest_operations = by_rounding("float16", Distance(0.0)), lambda: None
    search.policy_fields = lambda kept: {"deny": tuple(sorted(kept.modules)), "reasons": {"dtype": "it agrees"}}
    search.look = lambda kept, step: Seen(Replayed(1.0, {}, {}))
    search.failing_operations = lambda modules: ()
    search.framework, search.device, search.dtype = "toy", "cpu", "float16"
    assert searched(search, 0).deny == ("layer3",)
    assert search.runs <= most_runs(1, 9)


@pytest.mark.parametrize("planted", [(), ("layer3",), ("layer3", "layer7")])
def test_no_module_is_blamed_for_a_loss_scale_that_is_too_large(planted):
    search = PlantedSearch([f"layer{number}" for number in range(20)], planted, largest_scale=300.0)
    search.smallest_scale = 256.0
    assert needed(search, search.order).modules == set(planted)
    assert search.scale == 256.0
    assert search.runs <= most_runs(len(planted), 20)


def test_a_loss_scale_that_is_not_to_blame_falls_once_and_no_lower_than_gradients_allow():
    search = PlantedSearch(["a", "b", "c"], [], largest_scale=0.0)
    search.smallest_scale = 32.0
    assert needed(search, search.order) is None
    # Nothing and all in float32, the smallest scale, and one below it, which is tried once and in vain.
    assert (search.scale, search.runs) == (32.0, 2 + 1 + 1)


def test_a_loss_scale_at_which_gradients_flush_and_do_no_harm_is_taken():
    search = PlantedSearch(["a", "b", "c"], [], largest_scale=8.0)
    search.smallest_scale = 32.0
    assert needed(search, search.order) == Kept()
    assert search.scale <= 8.0


def test_each_set_is_judged_with_a_scale_that_fits_though_without_it_none_did():
    """Backward, `act` overflows at any scale in the dtype; with it in float32 gradients fit at some scales only."""

    class Overflowing(PlantedSearch):
        def compute(self, kept):
            missing, too_large = super().compute(kept)
            return missing, bool(missing) or too_large

    search = Overflowing(["first", "act", "last"], ["act"], largest_scale=300.0)
    assert needed(search, search.order).modules == {"act"}
    assert search.without == {"act": "steps are skipped"}
    assert search.runs <= most_runs(1, 3)


@pytest.mark.parametrize(
    ("gradients", "noise", "scale"),
    [
        *(([0.1], 0.0, 1.0), ([2.0**-20], 0.0, 8.0), ([0.1, 2.0**-20], 0.0, 8.0)),
        *(([0.1, 0.0], 0.0, 1.0), ([0.1, 2.0**-20], 1.0, 1.0)),  # what is noise may flush
    ],
)
def test_a_loss_scale_falls_only_as_far_as_gradients_do_not_flush(gradients, noise, scale):
    readings = [reading(f"layer{size}", "backward", 0, [size] * 4) for size in gradients]
    values = [ModuleError(f"layer{gradients[-1]}", "Dense", "backward", 0, "float16", noise, bound=0.02)]
    assert by_rounding("float16", Distance(0.0, 0.0, values)).smallest_scale("float16", readings) == scale
    assert by_rounding("float16", Distance(0.0)).smallest_scale("float16", []) == 1.0


class Faulty(Search):
    """Stands for runs with faults drawn at random, of which it counts every run and every look.

    A module may fail by itself; an operation may fail, in a module or outside, unless it is in float32, its module is,
    or the module in front, which hands float32 on; two modules may be at odds unless both are in float32 or none is;
    gradients may overflow at large scales, and those that flush at small ones may be missed.
    """

    def __init__(self, seed):
        draw = random.Random(seed)
        size = draw.randint(1, 40)
        leaves = [f"block{number // draw.choice((1, 2, 4))}.layer{number}" for number in range(size)]
        blocks = list(dict.fromkeys(name.partition(".")[0] for name in leaves))
        names = draw.choice(([*leaves, *blocks], [*leaves, *blocks, ""], leaves))
        super().__init__(False, [Reading(name, "", "", "forward", 0, "float16", Stats()) for name in names])
        self.framework, self.device, self.dtype = "toy", "cpu", "float16"
        self.tolerance = by_rounding("float16", Distance(0.0))
        self.broken = draw.sample(names, min(len(names), draw.choice((0, 1, 1, 2, 3, 6))))
        self.loses_digits = seed % 2 == 0
        operations = range(draw.choice((0, 0, 1, 2)))
        self.operations = {f"op{number}": (draw.choice([*names, ""]), draw.choice(names)) for number in operations}
        self.at_odds = draw.sample(names, 2) if len(names) > 1 and draw.random() < 0.2 else []
        self.scale, self.largest_scale = 2.0**16, draw.choice((2.0**20, 2.0**20, 2.0**9, 2.0))
        self.smallest_scale, self.is_missed = draw.choice((1.0, 32.0, 2.0**16)), draw.random() < 0.2
        self.runs = 6  # in float32, for the dtype of `auto`, twice and once more rounded, and in float32 again
        self.order = draw.sample(names, len(names)) if draw.random() < 0.5 else names
        self.first = self.settled(Kept())
        self.failures[Kept()] = self.failure(self.first)
        self.result = Kept()

    def is_kept(self, name, kept):
        return any(name == at or inside(name, at) for at in kept.modules)

    def faults(self, kept):
        """Return what fails with this in float32."""
        failing = [name for name in self.broken if not self.is_kept(name, kept)]
        for name, around in self.operations.items():
            handed_on = any(module in self.modules and self.is_kept(module, kept) for module in around)
            failing += [] if name in kept.operations or handed_on else [name]
        odd = len({self.is_kept(name, kept) for name in self.at_odds}) > 1
        return failing + ["odds"] * odd

    def compute(self, kept):
        self.runs += 1
        return kept, self.scale

    def overflows(self, run):
        return run[1] > self.largest_scale and not self.faults(run[0])

    def failure(self, run):
        kept, scale = run
        words = list(map(repr, self.faults(kept))) + ["overflow"] * (scale > self.largest_scale)
        return " and ".join(words + ["flush"] * (self.is_missed and scale < self.smallest_scale))

    def look(self, kept, step):
        self.runs += 1
        readings = [Reading(name, "", "", "forward", 0, "float16", Stats(4, largest=300.0)) for name in self.modules]
        for name, (module, _) in self.operations.items():
            fails = kept is not None and name in self.faults(kept)
            value = Stats(4, nonfinite=4) if fails else Stats(4, largest=9e4)
            dtype = "float16" if fails else "float32"
            readings.append(Reading(module, "", name, "forward", 0, dtype, value, Stats(4, largest=300.0)))
        return Seen(Replayed(1.0, {}, {}), tuple(readings))

    @property
    def beginning(self):
        outside = bool(self.operations) and not self.broken
        return Distance(math.inf, 0.0, [value("forward", 0.0)]) if outside else Distance(1.0)

    def smallest_operations(self):
        return minimal(list(self.operations), lambda names: bool(names) and self.passes(Kept(operations=names), 1))

    def failing_operations(self, modules):
        self.seen(Kept())
        return tuple(self.operations)

    def fails_rounded(self, module):
        self.runs += 1
        return self.loses_digits

    def policy_fields(self, kept):
        self.result = kept
        return {"reasons": {"dtype": "it agrees"}}

    def hopeless(self, whole):
        return in_float32("nothing helps", agrees=False)

    slow = times = None


Faulty.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("seed", [*range(400), 2130])
def test_whatever_fails_every_run_is_counted_and_bounded_and_each_entry_is_needed(seed):
    search = Faulty(seed)
    policy = searched(search, 0)
    kept = search.result
    assert policy.replays == search.runs <= most_runs(len(kept.entries), len(search.modules))
    assert search.ended == ("the search ended after" in policy.reasons["dtype"])
    if policy.dtype == "float32":
        assert search.ended or search.faults(Kept(frozenset(search.modules))) or "" in search.modules or search.failures
        return
    assert search.failure((kept, search.scale)) == ""
    for name in kept.entries:
        fails = search.failure((kept.without(name), search.scale))
        assert fails if search.without[name] else search.ended
    if search.broken and not (search.ended or search.operations or search.at_odds or "" in search.broken):
        alone = {name for name in search.broken if not any(inside(name, other) for other in search.broken)}
        assert kept.modules == alone or len(kept.modules) < len(alone)  # a block for several of its layers


def test_a_search_knows_the_loss_moved_by_an_error_in_first_order():
    def reading(direction, sample, module="a"):
        return Reading(module, "", "", direction, 0, "", Stats(elements=6), sample=np.array(sample, np.float32))

    reference = [reading("forward", [1, 2, 3]), reading("backward", [2, 0, -1]), reading("forward", [1], "b")]
    low = [reading("forward", [1.5, 7, 3]), reading("forward", [2], "b")]
    assert first_order(reference, low, 4.0) == {"a": 2 * 0.5 * 2 / 4.0}  # three elements stand for six


class Sensitive(Dense):
    """Overflows inside in float16, and returns what other layers return."""

    def forward(self, x):
        large = product(product(x, Tensor([2.0**10])), Tensor([2.0**10]))
        return product(super().forward(large), Tensor([2.0**-20]))


def layers(count, sensitive):
    kinds = {index: Sensitive if index in sensitive else Dense for index in range(count)}
    return Module(**{f"layer{index}": kind(Tensor([1.0], parameter=True)) for index, kind in kinds.items()})


def step(model):
    return total(model(Tensor([0.5, 1.0])))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_model_s_planted_layers_and_no_others_stay_in_float32(count):
    planted = random.Random(count).sample(range(50), count)
    policy = ampx.tune(step, layers(50, planted), framework="toy", dtype="float16", repeats=0)
    assert {choice.entry for choice in policy.deny} == {f"module:layer{index}" for index in planted}
    assert policy.replays <= most_runs(count, 50)
    assert (policy.dtype, policy.level, policy.loss_scale, policy.agrees) == ("float16", "O1", "dynamic", True)
    assert all(
        choice.reason == "its output is not finite in float16; without this entry the loss is not finite"
        for choice in policy.deny
    )
    comparison = ampx.compare(
        step, layers(50, planted), framework="toy", dtype="float16", deny=[choice.entry for choice in policy.deny]
    )
    assert comparison.agrees(policy.tolerance)


def test_operations_that_would_do_instead_of_the_modules_are_named():
    model, options = layers(4, (2,)), {"framework": "toy", "dtype": "float16"}
    policy = ampx.tune(step, model, **options, repeats=0)
    assert policy.operations == ("product",)
    assert not ampx.compare(step, model, **options).agrees(policy.tolerance)
    assert ampx.compare(step, model, **options, deny=policy.operations).agrees(policy.tolerance)
    assert ampx.tune(step, layers(4, ()), **options, repeats=0).operations == ()


def test_a_sound_model_needs_nothing_and_a_dtype_with_enough_exponents_needs_no_scale():
    policy = ampx.tune(step, layers(4, ()), framework="toy", dtype="bfloat16", repeats=0)
    assert (policy.deny, policy.loss_scale, policy.replays) == ((), 1.0, 4)
    assert ampx.tune(step, layers(4, ()), framework="toy", what_if="float8_e5m2").tolerance == 0.25
    assert policy.modules == ("layer0", "layer1", "layer2", "layer3", "")


def test_a_tolerance_that_rounding_exceeds_keeps_what_rounds():
    def thirds(model):
        return total(model(Tensor([1 / 3])))

    model = Module(near=Dense(Tensor([1.0], parameter=True)), exact=Dense(Tensor([1.0], parameter=True)))
    policy = ampx.tune(thirds, model, framework="toy", dtype="bfloat16", tolerance=1e-6, repeats=0)
    assert {choice.entry for choice in policy.deny} == {"module:near", "module:exact"}
    assert ampx.tune(thirds, model, framework="toy", dtype="bfloat16", tolerance=0.01, repeats=0).deny == ()


def value(direction, error):
    return ModuleError("layer", "Dense", direction, 0, "float16", error, bound=0.02)


@pytest.mark.parametrize(
    ("direction", "noise", "error", "exceeds"),
    [
        *(("forward", 0.0, 0.003, False), ("forward", 0.0, 0.005, True)),  # eight roundings of float16: 0.0039
        *(("backward", 0.0, 0.03, False), ("backward", 0.0, 0.04, True)),  # of bfloat16: 0.031
        *(("forward", 0.01, 0.07, False), ("forward", 0.01, 0.09, True)),  # eight times what was measured
        *(("backward", 0.01, 0.07, False), ("backward", 0.01, 0.09, True)),
        *(("forward", 0.5, 1.0, False), ("forward", 0.5, math.inf, True)),  # of noise nothing is known
        *(("backward", math.inf, 0.01, False), ("backward", math.inf, 0.04, True)),  # by its bound
    ],
)
def test_a_value_may_be_off_by_what_two_seeds_of_rounding_differ_by(direction, noise, error, exceeds):
    tolerance = by_rounding("float16", Distance(0.0, 0.0, [value(direction, noise)]))
    assert bool(tolerance.exceeded(Distance(0.0, 0.0, [value(direction, error)]))) == exceeds


@pytest.mark.parametrize(("noise", "loss", "gradients"), [(0.0, 2**-8, 2**-5), (0.01, 0.08, 0.08), (1.0, 0.25, 0.25)])
def test_loss_and_gradients_may_be_off_by_a_quarter_at_most(noise, loss, gradients):
    tolerance = by_rounding("float16", Distance(noise, noise))
    assert (tolerance.loss, tolerance.gradients) == (loss, gradients)
    asked = tolerance.at(0.5)
    assert (asked.loss, asked.gradients) == (0.5, 0.5)


def reading(module, direction, call, sample, nonfinite=0):
    return Reading(module, "", "", direction, call, "", Stats(4, nonfinite=nonfinite), sample=np.array(sample))


def test_gradients_of_all_calls_of_a_module_are_one_and_outputs_are_not():
    values = [reading("a", "forward", 0, [1.0]), reading("a", "forward", 1, [2.0])]
    values += [reading("a", "backward", 1, [3.0, 4.0]), reading("a", "backward", 0, [5.0], nonfinite=2)]
    joined = with_joined_gradients(values)
    assert [(entry.direction, entry.call, entry.sample.tolist()) for entry in joined] == [
        ("forward", 0, [1.0]),
        ("forward", 1, [2.0]),
        ("backward", 0, [3.0, 4.0, 5.0]),
    ]
    assert joined[-1].value.nonfinite == 2


def test_outputs_that_no_gradient_comes_back_to_are_one_beside_those_of_the_training():
    """Of 440 samples of a validation some output is close to zero, and far off by chance."""
    validation = [reading("a", "forward", call, [float(call)]) for call in range(3)]
    training = [reading("a", "forward", 3, [3.0]), reading("a", "backward", 3, [4.0])]
    joined = with_joined_gradients([*validation, *training])
    assert [(entry.direction, entry.call, entry.sample.tolist()) for entry in joined] == [
        ("forward", 0, [0.0, 1.0, 2.0]),
        ("forward", 3, [3.0]),
        ("backward", 0, [4.0]),
    ]
    assert len(with_joined_gradients(validation)) == 3  # for inference


def test_a_gradient_goes_wrong_in_the_backward_of_the_module_that_it_came_through():
    def error(name, direction, value):
        return ModuleError(name, "Dense", direction, 0, "float16", value, 0.1)

    errors = [error("a", "forward", 0.1), error("b", "forward", 0.1), error("c", "forward", 0.1)]
    errors += [error("c", "backward", 0.1), error("b", "backward", math.inf), error("a", "backward", math.inf)]
    assert by_error(["a", "b", "c"], errors) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("loss", "output", "gradient", "outside"),
    [
        *((math.inf, 0.001, 0.0, True), (0.0, 0.001, math.inf, True)),
        *((math.inf, 0.5, 0.0, False), (math.inf, math.inf, math.inf, False), (0.1, 0.001, 0.1, False)),
    ],
)
def test_a_fault_is_outside_where_all_that_modules_return_agrees(loss, output, gradient, outside):
    run = Distance(loss, 0.0, [value("forward", output), value("backward", gradient)])
    assert fails_outside(by_rounding("float16", Distance(0.0)), run) == outside
    assert not fails_outside(by_rounding("float16", Distance(0.0)), None)


def test_a_block_is_kept_as_a_whole_for_what_it_computes_itself():
    inner = layers(2, ())

    class Block(Module):
        def forward(self, x):
            return product(
                product(super().forward(product(x, Tensor([2.0**16]))), Tensor([2.0**10])), Tensor([2.0**-26])
            )

    model = Module(first=layers(2, ()), block=Block(**inner.modules), last=layers(1, ()))
    policy = ampx.tune(step, model, framework="toy", dtype="float16", repeats=0)
    assert [choice.entry for choice in policy.deny] == ["module:block"]


def test_a_fault_outside_of_modules_is_cured_by_an_operation():
    def outside(model):
        return total(product(product(step(model), Tensor([2.0**18])), Tensor([2.0**-18])))

    # Beside the product something else has to be low precision, or nothing is.
    options = {"framework": "toy", "dtype": "float16", "repeats": 0}
    policy = ampx.tune(outside, layers(2, ()), allow=["total"], **options)
    assert (policy.dtype, [choice.entry for choice in policy.deny]) == ("float16", ["product"])
    policy = ampx.tune(outside, layers(2, ()), **options)
    assert (policy.dtype, policy.deny) == ("float32", ())
    assert "nothing less than the whole model in float32" in policy.reasons["dtype"]


def test_where_nothing_helps_nothing_is_cast():
    def hopeless(model):
        low = casting_state().dtype or "float32"
        return (step(model).to(low) * 2.0**17).to("float32") * 2.0**-17

    policy = ampx.tune(hopeless, layers(2, ()), framework="toy", dtype="float16", repeats=0)
    assert (policy.dtype, policy.level, policy.deny) == ("float32", "O0", ())
    assert "nothing that can be kept" in policy.reasons["dtype"]
    broken = ampx.tune(lambda model: step(model) * math.inf, layers(2, ()), framework="toy", dtype="float16")
    assert (broken.dtype, broken.agrees, broken.replays, broken.enabled) == ("float32", False, 1, True)


def test_a_dtype_that_the_device_lacks_is_tried_and_its_speed_is_not_measured():
    def large(model):
        return total(model(Tensor([300.0, 400.0])))

    model = Module(
        small=Dense(Tensor([1.0], parameter=True)),
        doubles=Dense(Tensor([2.0], parameter=True)),
        halves=Dense(Tensor([0.5], parameter=True)),
    )
    policy = ampx.tune(large, model, framework="toy", what_if="float8_e4m3", tolerance=0.2)
    assert {"module:doubles", "module:halves"} <= {choice.entry for choice in policy.deny}  # 448 is the largest number
    assert (policy.speed, policy.dtype) == (None, "float8_e4m3")
    assert ampx.tune(large, model, framework="toy", what_if="float8_e5m2", tolerance=0.2).deny == ()


def test_a_policy_that_init_would_refuse_on_this_device_is_announced(monkeypatch, tmp_path):
    monkeypatch.setattr(ToyProbe, "simulates", lambda self, device: frozenset({"bfloat16"}))
    monkeypatch.setattr(ImplicitToy, "device", lambda self, name: ampx.Device("cpu", frozenset({"float16"})))
    with pytest.warns(ampx.PrecisionWarning, match="init refuses the policy on this device; computed here: float16"):
        policy = ampx.tune(step, layers(2, ()), framework="toy", dtype="bfloat16")
    assert (policy.dtype, policy.speed) == ("bfloat16", None)
    assert "where init refuses bfloat16" in policy.reasons["dtype"]
    policy.write(tmp_path / "ampx.toml")
    with pytest.raises(ampx.UnsupportedDtypeError, match="bfloat16"):
        ampx.init(policy=tmp_path / "ampx.toml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ampx.tune(step, layers(2, ()), framework="toy", what_if="bfloat16").dtype == "bfloat16"
        ordinary = ampx.tune(step, layers(2, ()), framework="toy", dtype="float16")
    assert "simulated" not in ordinary.reasons["dtype"]


def test_for_inference_gradients_do_not_count():
    def small(model):
        return total(model(Tensor([2.0**-12])))

    model = Module(**{f"layer{index}": Dense(Tensor([2.0**9], parameter=True)) for index in range(3)})
    assert ampx.tune(small, model, framework="toy", dtype="float16", repeats=0).deny
    policy = ampx.tune(small, model, framework="toy", dtype="float16", repeats=0, for_inference=True)
    assert (policy.deny, policy.loss_scale) == ((), 1.0)


def test_low_precision_that_does_not_pay_is_left_out(monkeypatch):
    def timed(seconds):
        return lambda clocks, repeats: {name: [seconds[name]] * repeats for name in clocks}

    slow = {"layer1": (2e-3, 1e-3)}
    monkeypatch.setattr(tuning, "slow_modules", lambda low, wide: slow)
    arguments = {"framework": "toy", "dtype": "bfloat16", "repeats": 2}
    monkeypatch.setattr(tuning, "measured", timed({"safe": 2.0, "float32": 1.0, "tuned": 1.5}))
    policy = ampx.tune(step, layers(2, ()), **arguments)
    assert (policy.dtype, policy.level, policy.speed, policy.enabled) == ("float32", "O0", 1.0, False)
    assert "enabled = false  # nothing is left but to check gradients" in policy.file.text()
    assert "0.67 times the speed" in policy.reasons["dtype"]
    monkeypatch.setattr(tuning, "measured", timed({"safe": 1.0, "float32": 1.2, "tuned": 0.8}))
    policy = ampx.tune(step, layers(2, ()), **arguments)
    assert [(choice.entry, choice.reason) for choice in policy.deny] == [
        ("module:layer1", "2 ms in bfloat16, 1 ms in float32")
    ]
    assert policy.speed == pytest.approx(1.5)
    monkeypatch.setattr(tuning, "measured", timed({"safe": 1.0, "float32": 1.2, "tuned": 1.0}))
    assert ampx.tune(step, layers(2, ()), **arguments).deny == ()
    monkeypatch.setattr(tuning, "measured", timed({"safe": 1.0, "float32": 1.01, "tuned": 1.0}))
    assert ampx.tune(step, layers(2, ()), **arguments).dtype == "float32"  # no difference: the simplest


def test_a_model_whose_modules_are_all_slow_in_low_precision_is_not_cast_in_name_only(monkeypatch):
    clocks = []

    def measured(clocks_by_name, repeats):
        clocks.append(set(clocks_by_name))
        return {name: [1.0 if name == "tuned" else 2.0] * repeats for name in clocks_by_name}

    monkeypatch.setattr(tuning, "measured", measured)
    slow = {"layer0": (2e-3, 1e-3), "layer1": (2e-3, 1e-3)}
    monkeypatch.setattr(tuning, "slow_modules", lambda low, wide: slow)
    arguments = {"framework": "toy", "dtype": "bfloat16", "repeats": 2}
    assert ampx.tune(step, layers(2, ()), **arguments).dtype == "float32"
    assert ampx.tune(step, layers(3, ()), **arguments).dtype == "bfloat16"
    assert ampx.tune(step, layers(3, ()), **arguments, deny=["module:layer2"]).dtype == "float32"
    assert clocks == [{"float32", "safe"}, {"float32", "safe", "tuned"}, {"float32", "safe"}]


def test_speed_is_what_the_backend_s_clock_says(monkeypatch):
    order = []

    def clock(self, model, step, plan):
        def seconds():
            order.append("float32" if plan is None else plan.dtype)
            return 3.0 if plan is None else 2.0

        return seconds

    monkeypatch.setattr(Probe, "clock", clock)
    monkeypatch.setattr(tuning, "slow_modules", lambda low, wide: {})
    policy = ampx.tune(step, layers(2, ()), framework="toy", dtype="bfloat16", repeats=2)
    assert (policy.dtype, policy.speed) == ("bfloat16", 1.5)
    assert order == ["float32", "bfloat16", "bfloat16", "float32", "float32", "bfloat16"]


def test_modules_are_not_timed_where_a_watch_runs_uncompiled(monkeypatch):
    monkeypatch.setattr(tuning, "slow_modules", lambda low, wide: pytest.fail("modules were timed") if low else {})
    monkeypatch.setattr(Probe, "watches_uncompiled", True)
    assert ampx.tune(step, layers(2, ()), framework="toy", dtype="bfloat16", repeats=1).speed is not None


def test_speed_is_measured_where_it_is_asked_for():
    policy = ampx.tune(step, layers(3, ()), framework="toy", dtype="bfloat16", repeats=2)
    assert policy.speed == 1.0 if policy.dtype == "float32" else policy.speed > 0  # which it is depends on the machine
    assert ampx.tune(step, layers(3, ()), framework="toy", dtype="bfloat16", repeats=0).speed is None


def timed(module, seconds):
    return Reading(module, "Dense", "", "forward", 0, "float32", Stats(), seconds=seconds)


def test_a_module_is_slow_only_if_median_and_best_say_so():
    low = [[timed("a", 3.0), timed("b", 1.0), timed("c", 1.0), timed("", 9.0)]] * 2 + [[timed("c", 5.0)]]
    wide = [[timed("a", 2.0), timed("b", 1.5), timed("c", 1.5), timed("", 5.0)]] * 2
    assert slow_modules(low, wide) == {"a": (3.0, 2.0)}


def test_the_fastest_of_runs_in_turns_is_that_is_ahead_beyond_the_spread():
    assert fastest({"a": [1.0, 2.0, 4.0], "b": [0.5, 1.0, 2.0]}) == "b"
    assert fastest({"a": [1.0, 2.0, 4.0], "b": [0.99, 1.99, 3.99]}) == "a"
    assert fastest({"a": [1.0, 1.0, 1.0, 1.0], "b": [0.9, 0.9, 1.1, 1.1]}) == "a"  # half of the rounds say otherwise
    assert fastest({"a": [1.0, 1.0, 1.0, 1.0], "b": [0.9, 0.9, 0.9, 1.1]}) == "b"


def test_a_dtype_that_was_faster_by_chance_is_said_to_be_within_the_spread():
    policy = TunedPolicy("toy", "cpu", "bfloat16", "O1", 1.0)
    assert not_faster(policy, {"float32": [1.0, 1.0], "safe": [2.0, 2.0]}) == (
        "bfloat16 agrees, and runs at 0.50 times the speed of float32 (0.50 to 0.50) here"
    )
    partly = replace(policy, deny=tuple(Choice(f"module:{name}", "") for name in "abcde"))
    assert not_faster(partly, {"float32": [1.0], "safe": [2.0]}).startswith(
        "bfloat16 with module:a, module:b, module:c and 2 more in float32 agrees, and runs at"
    )
    reason = not_faster(policy, {"float32": [1.0, 2.0, 3.0], "safe": [2.0, 1.0, 2.0], "tuned": [4.0, 4.0, 4.0]})
    assert "1.50 times the speed of float32 (0.50 to 2.00) here, which is within the spread" in reason


def test_a_speed_that_was_measured_is_said_with_its_spread():
    policy = TunedPolicy("toy", "cpu", "bfloat16", "O1", 1.0, reasons={"dtype": "it agrees"})
    timed_often, timed_once = (policy.timed(ratios, {}) for ratios in ([1.5, 2.0, 1.25], [1.5]))
    assert (timed_often.speed, timed_once.speed) == (1.5, 1.5)
    assert timed_often.reasons["dtype"] == "it agrees; 1.50 times the speed of float32 (1.25 to 2.00)"
    assert timed_once.reasons["dtype"].endswith("(one pair of runs)")


def test_rounds_that_differ_too_much_to_decide_are_followed_by_more(monkeypatch):
    rounds = []

    def measured(clocks, repeats):
        rounds.append(repeats)
        noisy = len(rounds) == 1  # the first rounds have float32 behind in half of them
        seconds = [1.5, 1.5, 0.9, 0.9] if noisy else [1.5] * repeats
        return {name: [1.0] * len(seconds) if name != "float32" else seconds for name in clocks}

    monkeypatch.setattr(tuning, "measured", measured)
    policy = ampx.tune(step, layers(2, ()), framework="toy", dtype="bfloat16", repeats=4)
    assert (rounds, policy.dtype, policy.speed) == ([4, 12], "bfloat16", 1.5)


def test_the_module_that_adds_most_to_the_error_is_asked_first_and_blocks_come_last():
    def error(name, value):
        return ModuleError(name, "Dense", "forward", 0, "float16", value, 0.1)

    errors = [error("a.x", 0.1), error("a.y", 0.5), error("a", 0.5), error("b", 0.55), error("c", math.inf)]
    errors += [error("d", math.inf), error("", math.inf)]
    assert by_error(["a.x", "a.y", "a", "b", "c", "d", ""], errors) == ["c", "a.y", "a.x", "b", "d", "a", ""]


def test_a_block_is_kept_with_all_inside_and_names_are_no_patterns():
    modules = ["block.0", "block", "head[1]", ""]
    assert kept_in_float32(["block", "head[1]"], modules) == {
        "block": "float32",
        "block.*": "float32",
        "head[[]1]": "float32",
    }
    assert kept_in_float32([""], modules) == {"": "float32", "*": "float32"}


def test_arguments_out_of_range_are_refused():
    for tolerance in (0.0, -1, "0.1"):
        with pytest.raises(ampx.InvalidOptionError, match="no tolerance"):
            ampx.tune(step, layers(1, ()), framework="toy", dtype="float16", tolerance=tolerance)
    with pytest.raises(ampx.InvalidOptionError, match="negative"):
        ampx.tune(step, layers(1, ()), framework="toy", dtype="float16", repeats=-1)
    with pytest.raises(ampx.UnsupportedDtypeError):
        ampx.tune(step, layers(1, ()), framework="toy", what_if="bfloat16")
    assert ampx.tune(step, layers(1, ()), framework="toy", dtype="float32").level == "O0"


def test_a_module_is_not_replaced_whose_own_output_is_wrong_before():
    search = ShieldedSearch()
    see = search.look

    def look(kept, step):
        first, *rest = see(kept, step).readings
        value = 1.0 if kept is None else 1.5
        return replace(see(kept, step), readings=(replace(first, sample=np.full(4, value, np.float32)), *rest))

    search.look = look
    kept = Kept(frozenset({"first"}))
    assert at_fault(search, kept) == kept
    assert search.hands_on == {}
