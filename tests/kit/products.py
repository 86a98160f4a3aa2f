"""Examples that are chosen for every run, of those that `make test-all` tries: of products, and of one rule.

Of products of parameters every run tries each value of each, and `make test-all` every combination.
"""

from collections import defaultdict

import pytest

# In these folders each combination compiles programs of its own: all products there are taken so.
COMPILING = {"jax", "tensorflow"}


def left_out(items):
    """Return the tests, of those marked `each_value` and of frameworks that compile, whose values others have.

    Those that put on record what they show stay: each combination is a cell of the tables. So do those that are marked
    `each_value(False)`: some combinations are skipped, and a value that has no other would not be tried at all.
    """
    functions = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("each_value")
        chosen = mark.args != (False,) if mark else COMPILING & {item.path.parent.name}
        if chosen and hasattr(item, "callspec") and "record_property" not in item.fixturenames:
            functions[item.nodeid.partition("[")[0]].append(item)
    return {item for each in functions.values() for item in _others(each)}


def _others(items):
    """Return the tests of a function that are not chosen: the one with the most values not tried yet, and so on."""
    values = {item: set(enumerate(_factors(item))) for item in items}
    left, missing = dict.fromkeys(items), set().union(*values.values())
    while missing:
        chosen = max(left, key=lambda item: len(values[item] & missing))
        missing -= values[chosen]
        del left[chosen]
    return left


def _factors(item):
    """Return the value of each factor: what one `parametrize` names together, or a fixture with values of its own."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [name.replace(" ", "").split(",") if isinstance(name, str) else list(name) for name in names]
    of_fixtures = set(item.callspec.params) - {name for group in together for name in group}
    groups = [*together, *([name] for name in sorted(of_fixtures))]
    return [tuple(_key(item.callspec.params.get(name)) for name in group) for group in groups]


def _key(value):
    return repr(value) if isinstance(value, (str, int, float, tuple, list, dict, type(None))) else id(value)


def first_of_each(names, kind=None):
    """Return parameters: the first name of each kind for every run; without kinds every second name.

    What PyTorch's planted faults and clean models show of the rules of `diagnose`, all of them on every run, is core's;
    other frameworks show that the rules get from them what they need.
    """
    kinds = [None if kind is None else kind(name) for name in names]
    every_run = [index % 2 == 0 if kind is None else kinds.index(kinds[index]) == index for index in range(len(kinds))]
    return [
        pytest.param(name, marks=() if here else pytest.mark.nightly)
        for name, here in zip(names, every_run, strict=True)
    ]
