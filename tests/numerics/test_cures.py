"""What is advised was tried: of a chain of modules in NumPy, which is computed anew for every change that is tried."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ampx.formats import to_digits
from ampx.numerics.batch import Refusal, Seen
from ampx.numerics.cures import Change
from ampx.numerics.diagnose import Setting, Suspect, examined
from ampx.numerics.probe import Reading, Replayed
from ampx.numerics.rounding import describe, round_to


@dataclass(frozen=True)
class Chain:
    """Modules one after the other, each with its operations: name and function of a vector.

    Attributes:
        steps: Module, operation, and what it computes.
        data: What the first receives.
        slope: The gradient of every weight, before the loss scale.
        inner: How many times larger gradients are between the modules than where they arrive.
        refuses: Operations that no list of operations names.
        promotes: Operations that compute in float32 where they receive it.
        accumulates: Operations that round what they return, and not what they receive.
        wide: Operations that compute in float32 whatever they receive.
    """

    steps: Sequence[tuple[str, str, Callable]]
    data: Sequence[float]
    slope: Sequence[float] = (1.0,)
    inner: float = 1.0
    refuses: tuple[str, ...] = ()
    promotes: tuple[str, ...] = ()
    accumulates: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    def run(self, dtype="float32", scale=1.0, float32=(), operations=(), rounded="", bits=0):
        """Compute the loss, the gradients, and what is read on the way."""
        value, readings, calls, of_value = np.asarray(self.data, np.float32), [], {}, dtype

        def read(module, operation, before, at):
            key = (module, operation)
            calls[key] = calls.get(key, -1) + 1
            stats = describe(value, "float16"), describe(before)
            call = calls[key]
            readings.append(Reading(module, "Layer", operation, "forward", call, at, *stats, np.ravel(value)))

        with np.errstate(all="ignore"):
            for module, steps in itertools.groupby(self.steps, key=lambda step: step[0]):
                cut = functools.partial(to_digits, bits=bits) if rounded and module == rounded else np.asarray
                received = value = cut(value)
                for _, operation, compute in steps:
                    kept = any(module == name or module.startswith(f"{name}.") for name in float32)
                    at = "float32" if kept or operation in (*operations, *self.wide) else dtype
                    at = of_value if operation in self.promotes and of_value == "float32" else at
                    before = value if operation in self.accumulates else round_to(value, at)
                    value, of_value = round_to(compute(before), at), at
                    read(module, operation, before, at)
                value = cut(value)
                if module:
                    read(module, "", received, at)
            slope = round_to(round_to(np.asarray(self.slope) * scale * self.inner, dtype) / self.inner, dtype)
        backward = Reading("", "Net", "", "backward", 0, dtype, describe(slope))
        return Seen(Replayed(float(value.sum()), {"w": slope / scale}, {"w": describe([1.0])}), (*readings, backward))

    def again(self, dtype, scale, tried):
        """Return what runs a change, and puts it on a list."""

        def run(change: Change, modules: Sequence[str]):
            tried.append(change)
            if set(change.operations) & {*self.refuses}:
                return Refusal("UnsupportedOpError: no such operation")
            return self.run(
                change.dtype or dtype,
                scale if change.scale is None else change.scale,
                change.float32,
                change.operations,
                change.rounded,
                change.bits,
            )

        return run

    def examine(self, dtype="float16", scale=1.0):
        """Return the diagnosis, and the changes that it tried."""
        tried = []
        low = self.run(dtype, scale)
        again = self.again(dtype, scale, tried)
        return examined(Suspect(low, self.run(), Setting(dtype, scale, prepare_finds_modules=True), again)), tried

    def smallest_cures(self, dtype="float16", within=0.02):
        """Return the smallest sets of modules in float32 with which the loss is right: all sets, tried in turn."""
        names = sorted({module for module, _, _ in self.steps if module})
        exact = self.run().replayed.loss
        for size in range(len(names) + 1):
            sets = [
                chosen
                for chosen in itertools.combinations(names, size)
                if abs(self.run(dtype, float32=chosen).replayed.loss - exact) <= within * abs(exact)
            ]
            if sets:
                return sets
        return []


def denied(diagnosis):
    return tuple(sorted(name.removeprefix("module:") for name in diagnosis.deny))


OVERFLOWS = Chain([("a", "mul", lambda x: x * 2), ("b", "square", np.square), ("b", "sqrt", np.sqrt)], [300.0, 1.0])
ROOT = ("square", np.square), ("sqrt", np.sqrt)
TWO = Chain([("a", *ROOT[0]), ("a", *ROOT[1]), ("b", "relu", np.abs), ("c", *ROOT[0]), ("c", *ROOT[1])], [400.0])


@pytest.mark.parametrize(("chain", "size"), [(OVERFLOWS, 1), (TWO, 2)])
def test_the_modules_that_are_advised_are_a_smallest_set_that_cures(chain, size):
    diagnosis, tried = chain.examine()
    assert denied(diagnosis) in chain.smallest_cures()
    assert len(denied(diagnosis)) == size
    assert diagnosis.kind == "overflow"
    *_, cure = (experiment for experiment in diagnosis.experiments if experiment.cures)
    assert cure.error < 0.02
    assert len(diagnosis.experiments) == len(tried)
    assert f"  cure, tried: {cure}" in str(diagnosis)
    assert "deny=" in diagnosis.advice


@pytest.mark.parametrize(("module", "computes"), [("b", "promotes"), ("", "accumulates"), ("", "promotes")])
def test_the_module_that_rounded_what_is_missed_later_is_named_and_not_where_it_is_missed(module, computes):
    """What `a` rounds away is all that is left of a difference, which float32 there does not bring back."""
    steps = [("a", "add", lambda x: x + 2048), (module, "sub", lambda x: x - 2048)]
    chain = Chain(steps, [0.3, 0.6, 0.7], **{computes: ("sub",)})
    exact = chain.run().replayed.loss
    assert chain.run("float16", float32=("b",)).replayed.loss != pytest.approx(exact, rel=0.1)
    assert chain.smallest_cures() == [("a",)]
    diagnosis, _ = chain.examine()
    assert diagnosis.deny == ("module:a",)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "a")
    assert diagnosis.why.startswith("the output of module 'a' loses precision in float16 that is needed later: the ")


def test_the_module_in_which_digits_are_lost_is_named_and_not_one_in_float32_that_subtracts_behind_it():
    """Its output is off by 2 %, and float32's, rounded, would do: the digits are lost in it, one addition at a time."""
    small = ("flow", "add", lambda x: x + x / 2048)
    chain = Chain([*[small] * 32, ("shift", "sub", lambda x: x - 12)], [12.0, 12.5], wide=("sub",))
    exact = chain.run().replayed.loss
    rounded = chain.run("float32", rounded="flow", bits=8).replayed.loss
    assert rounded == pytest.approx(exact, rel=0.1)
    assert chain.smallest_cures("bfloat16") == [("flow",)]
    diagnosis, _ = chain.examine("bfloat16")
    assert denied(diagnosis) == ("flow",)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "flow")


def test_the_layer_that_rounds_is_named_and_not_the_module_around_it_that_only_moves_its_numbers():
    steps = [
        ("critic.value", "add", lambda x: x + 2048),
        ("critic", "squeeze", np.copy),
        ("", "sub", lambda x: x - 2048),
    ]
    diagnosis, _ = Chain(steps, [0.3, 0.6, 0.7], promotes=("squeeze", "sub")).examine()
    assert diagnosis.deny == ("module:critic.value",)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "critic.value")


def test_a_module_that_returns_zero_of_what_it_rounded_is_named_and_not_the_logarithm_of_it():
    sigmoid = ("kept", "sigmoid", lambda x: 1 / (1 + np.exp(-x)))
    log = ("loss", "log", lambda x: -np.log(x))
    chain = Chain([sigmoid, ("kept", "rsub", lambda x: 1 - x), log], [9.0, 10.0], promotes=("log",))
    diagnosis, _ = chain.examine()
    assert denied(diagnosis) == ("kept",)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "kept")


def test_a_module_is_not_blamed_whose_float32_only_widens_what_is_computed_of_its_output():
    """`a` in float32 cures, for what is added and subtracted behind it is in float32, too; rounded, its output does."""
    steps = [("a", "relu", np.abs), ("", "add", lambda x: x + 2048), ("", "sub", lambda x: x - 2048)]
    chain = Chain(steps, [0.3, 0.6, 0.7], promotes=("add", "sub"))
    diagnosis, _ = chain.examine()
    assert diagnosis.deny == ("module:a",)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "")


def test_an_operation_outside_of_modules_is_kept_in_float32_where_the_backend_takes_its_name():
    steps = [("a", "relu", np.abs), ("", "square", np.square), ("", "sqrt", np.sqrt)]
    chain = Chain(steps, [300.0, 1.0])
    diagnosis, tried = chain.examine()
    assert any(change.operations == ("square",) for change in tried)
    kept = chain.run("float16", operations=("square",)).replayed.loss
    assert diagnosis.experiments[-1].cures or not math.isfinite(kept)


@pytest.mark.parametrize(
    ("before", "words"),
    [(("", "relu"), "loses"), (("a", "relu"), "loses"), (("a", "add"), "may lose")],
)
def test_an_operation_is_named_whose_float32_cures_what_shows_behind_it(before, words):
    """`sub` is in float32 as it is. Kept in float32 wherever it is, `add` alone cures, and no module does."""
    last = [("", "add", lambda x: x + 2048), ("", "sub", lambda x: x - 2048)]
    chain = Chain([(*before, np.abs), *last], [0.3, 0.6, 0.7], wide=("sub",))
    assert chain.smallest_cures() == []
    diagnosis, _ = chain.examine()
    assert diagnosis.deny == ("add",)
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place.module, place.operation) == ("digits", "", "add")
    assert diagnosis.why.startswith(f"the output of add {words} precision in float16 that is needed later: the output")


def test_an_operation_of_a_module_is_not_named_where_the_same_elsewhere_is_at_fault():
    """With the module of the place in float32 nothing is cured, and so nothing in it is why."""
    steps = [("", "add", lambda x: x + 2048), ("b", "add", np.copy), ("b", "sub", lambda x: x - 2048)]
    chain = Chain(steps, [0.3, 0.6, 0.7], wide=("sub",))
    diagnosis, tried = chain.examine()
    assert tried[0].float32 == ("b",)
    assert diagnosis.deny == ("add",)
    assert (diagnosis.first_nonfinite.module, diagnosis.first_nonfinite.operation) == ("b", "sub")


def test_a_range_that_no_module_explains_is_cured_by_a_dtype_with_a_wider_one():
    chain = Chain([("", "square", np.square)], [300.0, 1.0], refuses=("square",))
    diagnosis, tried = chain.examine()
    assert len(diagnosis.experiments) == len(tried) - 1  # what is refused is nothing that was tried
    assert abs(chain.run("bfloat16").replayed.loss / chain.run().replayed.loss - 1) < 0.02
    assert diagnosis.experiments[-1].cures
    assert str(diagnosis.experiments[-1]).startswith("in bfloat16, at a loss scale of 1: loss ")
    assert diagnosis.advice == 'amp = ampx.init(dtype="bfloat16")'
    assert diagnosis.deny == ()


def test_what_cures_nothing_is_listed_and_nothing_is_called_a_cure():
    """Whatever is in float32, an operation of the script rounds to float16 by itself."""
    by_hand = ("b", "mul", lambda x: round_to(x * 1e4, "float16"))
    chain = Chain([("a", "relu", np.abs), by_hand], [30.0, 1.0])
    exact = Chain([("a", "relu", np.abs), ("b", "mul", lambda x: x * 1e4)], [30.0, 1.0]).run()
    tried = []
    diagnosis = examined(
        Suspect(chain.run("float16"), exact, Setting("float16", 1.0), chain.again("float16", 1.0, tried))
    )
    assert tried
    assert not any(experiment.cures for experiment in diagnosis.experiments)
    assert (diagnosis.kind, diagnosis.deny) == ("overflow", ())
    assert "cure, tried" not in str(diagnosis)
    assert f"  no cure: {diagnosis.experiments[0]}" in str(diagnosis)
    assert "may cure it" in diagnosis.advice or diagnosis.advice == ""


def test_what_a_change_raises_is_put_on_record_and_is_no_cure():
    setting, refusal = Setting("float16", 1.0), Refusal("ValueError: no")
    diagnosis = examined(Suspect(OVERFLOWS.run("float16"), OVERFLOWS.run(), setting, lambda change, modules: refusal))
    assert str(diagnosis.experiments[0]) == "with module 'b' in float32: ValueError: no"
    assert not any(experiment.cures for experiment in diagnosis.experiments)


def test_gradients_that_overflow_at_the_loss_scale_only_are_no_fault_of_a_module():
    chain = replace(OVERFLOWS, data=(3.0, 1.0), slope=(1.0, 100.0))
    diagnosis, tried = chain.examine(scale=2.0**16)
    assert (diagnosis.kind, diagnosis.precision_is_innocent, diagnosis.advice) == ("loss scale", True, "")
    (scale,) = {change.scale for change in tried}
    assert math.isfinite(np.float16(100.0 * scale))
    assert diagnosis.experiments[-1].cures


def test_a_loss_that_overflows_is_cured_at_a_scale_that_its_gradients_fit():
    """The module is in float32, and the batch is at its loss scale: the gradients must fit that, too."""
    chain = replace(OVERFLOWS, slope=(1.0, 100.0))
    diagnosis, tried = chain.examine(scale=2.0**16)
    assert denied(diagnosis) == ("b",)
    assert all(change.scale is not None and np.isfinite(np.float16(100.0 * change.scale)) for change in tried)


def test_where_gradients_overflow_between_modules_a_cure_is_tried_at_a_scale_of_1():
    chain = replace(OVERFLOWS, inner=2.0**12)
    diagnosis, tried = chain.examine(scale=2.0**16)
    assert denied(diagnosis) == ("b",)
    scales = [change.scale for change in tried]
    assert scales[-1] == 1.0 < scales[0]
    assert chain.run("float16", scales[0], ("b",)).only_gradients_overflow
    assert [str(experiment).partition(":")[0] for experiment in diagnosis.experiments] == [
        "with module 'b' in float32, at a loss scale of 1"
    ]


def test_gradients_that_flush_at_every_scale_that_the_largest_fits_are_named():
    """A gradient of 1e-10 beside one of 1e4: whichever scale the large one fits, float16 has no room for the small."""
    chain = replace(OVERFLOWS, data=(3.0, 1.0), slope=(1e4, *[1e-10] * 15))
    diagnosis, tried = chain.examine(scale=2.0**16)
    assert diagnosis.kind == "flush"
    assert "at the largest loss scale tried at which none overflows: most of the gradient of w is lost" in diagnosis.why
    scale = tried[0].scale  # no larger one was tried that fits
    assert not chain.run("float16", scale).overflows
    assert all(change.scale <= scale or chain.run("float16", change.scale).overflows for change in tried)
    assert diagnosis.advice == 'amp = ampx.init(dtype="bfloat16")'  # which holds 1e-10


def test_a_module_of_a_second_model_is_named_for_prepare_and_for_a_policy_file():
    renamed = Chain([(f"Critic:{module}", *step) for module, *step in OVERFLOWS.steps], OVERFLOWS.data)
    diagnosis, _ = renamed.examine()
    assert diagnosis.deny == ("module:b",)
    assert "deny=['module:b']" in diagnosis.advice
    assert "the Critic, before wrap_optimizer; in a policy file: ['module:b']" in diagnosis.advice


def test_of_a_model_as_a_whole_the_entry_of_a_policy_file_that_was_tried_is_advised():
    whole = Chain([("Critic:", *step) for _, *step in OVERFLOWS.steps], OVERFLOWS.data)
    diagnosis, _ = whole.examine()
    assert diagnosis.deny == ("module:Critic:",)
    assert diagnosis.advice == "deny = ['module:Critic:']  # in a policy file: keep it in float32"


@pytest.mark.parametrize("seed", range(8))
def test_what_is_advised_of_a_random_chain_cures_it(seed):
    """Of modules that square and take roots, the ones that receive more than 255 overflow: which do, is random."""
    source = np.random.default_rng(seed)
    steps = []
    for index in range(4):
        factor = float(2.0 ** source.integers(-4, 9))
        steps += [(f"m{index}", "mul", lambda x, factor=factor: x * factor)]
        steps += [(f"m{index}", "square", np.square), (f"m{index}", "sqrt", np.sqrt)]
        steps += [(f"m{index}", "mul", lambda x, factor=factor: x / factor)]
    chain = Chain(steps, [1.0, 1.5])
    diagnosis, _ = chain.examine()
    fails = not math.isfinite(chain.run("float16").replayed.loss)
    assert fails == (diagnosis.kind != "healthy")
    if diagnosis.deny:
        loss = chain.run("float16", float32=denied(diagnosis)).replayed.loss
        assert abs(loss / chain.run().replayed.loss - 1) < 0.02
        assert denied(diagnosis) in chain.smallest_cures()


def test_a_change_says_in_words_what_it_changes():
    assert str(Change(("a", "b"), scale=8.0)) == "with modules 'a' and 'b' in float32, at a loss scale of 8"
    assert str(Change(operations=("exp",), dtype="bfloat16")) == "with operation 'exp' in float32, in bfloat16"
    assert str(Change()) == ""


STEPS = 512


def growing(inner="", outside=(), encoder=lambda x: x):
    """Return a chain that grows by a quarter in steps of less than half a digit of bfloat16, or by none.

    Its loss is wrong, and each of its values is off by no more than so many roundings explain. `inner` computes what is
    added, and what stands outside adds more of the same.
    """
    small = ("solver", "add", lambda x: x + x / 2048)
    steps = [("encoder", "mul", encoder), *[small] * STEPS]
    if inner:
        adds = ("solver", "add", lambda x: x + x / 2048)
        steps = [("encoder", "mul", encoder), *[(f"solver.{inner}", "tanh", np.copy), adds] * STEPS]
    return Chain([*steps, *[(name, *small[1:]) for name in outside], ("", "sub", lambda x: x - 0.5)], [1.0, 1.0])


def parted(chain, dtype="bfloat16"):
    """Return the diagnosis of a chain whose training is wrong there, and the changes that it tried."""
    tried = []
    again = chain.again(dtype, 1.0, tried)
    return examined(Suspect(chain.run(dtype), chain.run(), Setting(dtype, 1.0, True), again, parts=True)), tried


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (growing(), "module 'solver' loses precision"),
        # `field` in float32 hands float32 on to what is added behind it, in `solver`: which of the two is not known.
        (replace(growing("field"), promotes=("add",)), "module 'solver' loses precision"),
        (growing("field"), "module 'solver' loses precision"),  # it computes nothing that is lost
        (replace(growing(), promotes=("sub",)), "module 'solver', or what is computed of its output, loses precision"),
    ],
)
def test_a_loss_of_which_no_value_is_wrong_is_said_of_the_smallest_module_that_cures_it(chain, words):
    exact = chain.run().replayed.loss
    assert abs(chain.run("bfloat16").replayed.loss / exact - 1) > 0.25
    diagnosis, tried = parted(chain)
    assert ("solver",) in chain.smallest_cures("bfloat16")
    assert (diagnosis.kind, diagnosis.deny, diagnosis.first_nonfinite.module) == (
        "digits",
        ("module:solver",),
        "solver",
    )
    # Values in the module are right or not: nothing shows which.
    assert diagnosis.last_finite.module == "encoder"
    assert diagnosis.chain == ()
    assert diagnosis.why.startswith(words)
    kept = chain.run("bfloat16", float32=("solver",)).replayed.loss
    assert f"with that module in float32 {float(f'{100 * abs(kept / exact - 1):.2g}'):g} %" in diagnosis.why
    assert str(diagnosis.experiments[-1]).startswith("with module 'solver' in float32: ")
    assert len(tried) == len({change.float32 for change in tried}) <= 4


def test_the_part_that_loses_digits_is_named_and_not_the_module_around_it():
    step = ("outer.inner", "add", lambda x: x + x / 2048)
    chain = Chain([*[step] * STEPS, ("outer", "mul", np.copy), ("", "sub", lambda x: x - 0.5)], [1.0, 1.0])
    diagnosis, _ = parted(chain)
    assert diagnosis.deny == ("module:outer.inner",)
    assert denied(diagnosis) in chain.smallest_cures("bfloat16")


@pytest.mark.parametrize(
    "chain",
    [
        growing(outside=["head"] * STEPS),  # both lose digits, and neither alone cures
        growing(outside=[""] * STEPS),  # where no module has the name
        Chain([(f"m{at}", "mul", np.copy) for at in range(9)], [1.0, 1.0]),  # whose loss is right
    ],
)
def test_of_a_loss_that_no_single_module_cures_nothing_is_said(chain):
    diagnosis, tried = parted(chain)
    assert (diagnosis.kind, diagnosis.deny, diagnosis.experiments) == ("healthy", (), ())
    assert len(tried) <= 4


def test_no_module_is_blamed_for_a_loss_that_is_off_by_little():
    """What rounds otherwise may bring it nearer to float32's by chance, however little noise there is."""
    chain = Chain([("a", "mul", lambda x: x * 1.009), ("b", "abs", np.abs)], [1.0, 1.0], wide=("abs",))
    low, exact = chain.run("bfloat16"), replace(chain.run(), tolerance=1e-3)
    off = abs(low.replayed.loss / exact.replayed.loss - 1)
    kept = chain.run("bfloat16", float32=("a",)).replayed.loss
    assert 1e-3 < off < 0.01
    assert kept == pytest.approx(exact.replayed.loss, rel=1e-3)
    again = chain.again("bfloat16", 1.0, [])
    batch = Suspect(low, exact, Setting("bfloat16", 1.0, True), again, compared=lambda: exact, parts=True)
    assert examined(batch).kind == "healthy"


def test_no_module_is_tried_where_the_loss_is_right():
    chain = Chain([("a", "mul", np.copy), ("b", "mul", np.copy)], [1.0, 1.0])
    diagnosis, tried = chain.examine("bfloat16")
    assert (diagnosis.kind, tried) == ("healthy", [])
