"""Names, patterns and interceptors of a model's modules, for modules that are plain objects."""

import pytest

import ampx
from ampx.backend import CastPlan
from ampx.modules import (
    FORCES,
    WATCHERS,
    CallInterceptors,
    Names,
    float32_modules,
    inherited,
    is_meant,
    last_match,
    listed,
    module_dtypes,
    name_models,
    outer_name,
    present_name,
    unmatched,
)


class Module:
    def __init__(self, **parts):
        self.parts = parts


class Norm(Module):
    pass


def named(module):
    yield "", module
    for name, part in module.parts.items():
        for inner, leaf in named(part):
            yield f"{name}.{inner}" if inner else name, leaf


@pytest.mark.parametrize(("values", "expected"), [(None, []), (3, [3]), ([3, 4], [3, 4]), ((3,), [3])])
def test_one_value_or_several_or_none_are_a_list(values, expected):
    assert listed(values, int, "model", "an integer") == expected


@pytest.mark.parametrize("values", ["three", [3, "three"], {3}])
def test_what_is_no_model_is_refused_with_what_is_accepted(values):
    with pytest.raises(ampx.InvalidOptionError, match=r"prepare got (str|set) as the model; accepted: an int"):
        listed(values, int, "model", "an integer")


def test_models_that_are_called_get_names_of_their_own():
    leaf = Module()
    first, second, third, foreign = Module(fc=leaf), Module(fc=Module()), Module(fc=Module()), object()
    names = Names(None, lambda module: named(module) if isinstance(module, Module) else [])
    assert [names.of(module) for module in (leaf, first)] == ["", ""]  # it was called before its model
    assert [names.of(model) for model in (second, third)] == ["Module:", "Module#2:"]
    assert [names.of(model.parts["fc"]) for model in (second, third)] == ["Module:fc", "Module#2:fc"]
    assert names.of(leaf) == "fc"
    assert list(names) == ["", "fc", "Module:", "Module:fc", "Module#2:", "Module#2:fc"]
    assert names.of(foreign) == "object:"


def test_a_part_of_a_larger_model_has_its_name_within_that_from_then_on():
    leaf = Module()
    inner = Module(fc=leaf)
    names, added = Names(None, named), []
    names._added = added.extend
    other, middle = Module(inner=Module()), Module(inner=inner)
    outer = Module(head=Module(), middle=middle)
    calls = [names.of(leaf), names.of(other), names.of(inner), names.of(middle), names.of(outer)]
    assert [present_name(name) for name in calls] == ["middle.inner.fc", "Module:", "middle.inner", "middle", ""]
    assert names.of(leaf) == "middle.inner.fc"
    assert [name for name, part in added if part is leaf] == ["", "fc", "inner.fc", "middle.inner.fc"]
    for pattern in ("", "fc", "inner.fc", "middle.inner.fc"):  # those that it had mean it, too
        assert names.dtype(leaf, {pattern: "float32"}.get) == "float32"
    assert names.dtype(leaf, {"Module:inner": "float32", "head": "float32"}.get) is None


def test_a_part_of_two_models_keeps_its_name_within_the_first_that_is_called():
    shared = Module()
    first, second = Module(a=shared), Module(b=shared, c=Module())
    names = Names(None, named)
    assert [names.of(module) for module in (first, second)] == ["", "Module:"]
    assert [names.of(module) for module in (shared, second.parts["c"])] == ["a", "Module:c"]
    both = Module(x=second, y=first)
    assert [names.of(module) for module in (both, first, second, shared)] == ["", "y", "x", "x.b"]


class Trainer:
    def __init__(self, model):
        self.model = model


def test_what_only_a_larger_model_reaches_is_named_within_the_largest():
    small = Module(fc=Module())
    trainer = Trainer(Module(other=Module(), small=small))
    reached = Names(None, named, kinds=(Module,)).of(trainer.model.parts["small"].parts["fc"])
    unseen = Names(None, named).of(small.parts["fc"])
    own = small.parts["fc"]
    held = Names(None, named, kinds=(Module,)).of(own)
    assert (reached, unseen, held) == ("small.fc", "", "")


def test_modules_beside_a_model_that_is_known_have_no_name():
    model = Module(fc=Module())
    names = Names(model, named)
    assert (names.of(model.parts["fc"]), names.of(Module())) == ("fc", None)
    names.check(["f*"], "prepare")
    with pytest.raises(ampx.UnsupportedOpError, match=r"prepare got the pattern 'g\*'.* names such as '', 'fc'"):
        names.check(["g*"], "prepare")


def test_modules_of_several_models_are_named_as_when_they_are_called_and_meant_with_or_without_the_class():
    first, second = Module(fc=Module()), Module(fc=Module(inner=Module()))
    modules = name_models([first, second], named)
    assert [name for name, _ in modules] == ["", "fc", "Module:", "Module:fc", "Module:fc.inner"]
    assert modules[3][1] is second.parts["fc"]
    meant = {"fc": ["fc", "Module:fc"], "Module:fc*": ["Module:fc", "Module:fc.inner"], "Other:fc": []}
    for pattern, names in meant.items():
        assert [name for name, _ in modules if is_meant(name, pattern)] == names
    assert unmatched(meant, [name for name, _ in modules], is_meant) == ["Other:fc"]
    plan = CastPlan("cpu", "float16", deny=("module:Module:fc",))
    assert float32_modules(modules, plan, ()) == [second.parts["fc"], second.parts["fc"].parts["inner"]]


def test_a_wrapper_has_the_name_of_what_it_wraps():
    model = Module(fc=Module())
    wrapper = Module()
    names, added = Names(None, lambda module: named(model if module is wrapper else module)), []
    names._added = added.extend
    assert names.of(wrapper) == names.of(model) == ""
    assert [name for name, _ in added] == ["", "fc"]


@pytest.mark.parametrize(
    ("name", "outer"),
    [("a.b.c", "a.b"), ("a", ""), ("Net:a.b", "Net:a"), ("Net:a", "Net:"), ("Net:", None), ("", None)],
)
def test_the_module_around_another(name, outer):
    assert outer_name(name) == outer


def test_the_last_pattern_that_matches_counts_and_is_inherited():
    dtypes = {"block*": "float16", "*.norm": "float32"}
    assert [last_match(name, dtypes) for name in ("block.fc", "block.norm", "head")] == ["float16", "float32", None]
    assert inherited("block.norm.scale", {"block": "float16", "block.norm": "float32"}.get) == "float32"
    assert inherited("head.fc", {"block": "float16"}.get) is None
    assert unmatched(["block*", "tail"], ["block", "head"]) == ["tail"]


def test_denied_modules_and_norms_that_nobody_allows_stay_in_float32():
    model = Module(first=Norm(), second=Norm(), fc=Module(inner=Module()))
    plan = CastPlan("cpu", "float16", allow=("module:second", "module:fc"), deny=("module:fc",))
    assert module_dtypes(plan) == {"second": "float16", "fc": "float32"}
    kept = float32_modules(named(model), plan, (Norm,))
    assert kept == [model.parts["first"], model.parts["fc"], model.parts["fc"].parts["inner"]]


class Interceptor:
    def __init__(self, mark, seen):
        self.mark, self.seen = mark, seen

    def call(self, module, forward, inputs, options):
        self.seen.append(self.mark)
        return [self.mark, *forward(*inputs, **options)]


def test_interceptors_stand_in_their_order_and_the_framework_is_changed_while_there_are_any():
    changes, seen = [], []
    calls = CallInterceptors(lambda: changes.append("install"), lambda: changes.append("uninstall"))
    force, watch, inner = Interceptor("force", seen), Interceptor("watch", seen), Interceptor("inner", seen)
    with calls.around((FORCES, force)), calls.around((WATCHERS, watch), (FORCES, inner)):
        assert calls.run("module", lambda value, more: [value, more], 1, more=2) == ["watch", "force", "inner", 1, 2]
        assert changes == ["install"]
    assert (seen, changes) == (["watch", "force", "inner"], ["install", "uninstall"])
    assert calls.run("module", lambda value: [value], 1) == [1]
