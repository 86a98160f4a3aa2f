"""The search for the smallest set is exact, and short."""

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from ampx.numerics.tune import minimal


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
