"""A diagnosis names the place and the cause, and accuses nobody where nothing is wrong."""

import functools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

import ampx
from ampx.numerics.batch import Refusal, Seen, in_one_line
from ampx.numerics.causes import find_fault, gradient_fault
from ampx.numerics.chain import chain
from ampx.numerics.compare import key_of, padded
from ampx.numerics.diagnose import Setting, Suspect, examined
from ampx.numerics.operations import family
from ampx.numerics.places import Place
from ampx.numerics.probe import Reading, Replayed, Stats
from ampx.numerics.rounding import describe, round_to
from toy import framework
from toy.framework import Dense, Dropout, Module, Tensor, total

pytestmark = pytest.mark.usefixtures("toys")


def read(operation, inputs, value, module="block", direction="forward", dtype="float16", call=0):
    return Reading(
        module,
        "Block",
        operation,
        direction,
        call,
        dtype,
        describe(value, "float16"),
        describe(inputs),
        place="net.py:7",
    )


def seen(*readings, loss=1.0, gradients=(1.0,), weights=(1.0,)):
    stats = describe(weights)
    return Seen(Replayed(loss, {"w": np.array(gradients, np.float32)}, {"w": stats}), tuple(readings))


def diagnosed(low, reference, dtype, scale=1.0):
    """Say where a batch first fails, and why, and try nothing."""
    return examined(Suspect(low, reference, Setting(dtype, scale)))


def in_both(operation, inputs, compute, dtype="float16"):
    """Compute an operation in float32 and in a dtype, and diagnose it: a value before it is finite."""
    with np.errstate(all="ignore"):
        exact_inputs = np.asarray(inputs, np.float32)
        low_inputs = round_to(exact_inputs, dtype)
        exact = compute(exact_inputs)
        low = round_to(compute(low_inputs), dtype)
    before = read("relu", [1.0], [1.0], module="before")
    reference = seen(before, read(operation, exact_inputs, exact, dtype="float32"))
    failing = seen(before, read(operation, low_inputs, low), loss=math.nan)
    return diagnosed(failing, reference, dtype)


@pytest.mark.parametrize(
    ("operation", "inputs", "compute", "kind"),
    [
        ("bmm", [300.0, 400.0], lambda x: x[:1] * x[1:], "overflow"),
        ("aten::exp", [20.0], np.exp, "overflow"),
        ("sum", [30_000.0] * 8, lambda x: x.sum(keepdims=True), "sum"),
        ("reduce_sum", [30_000.0] * 8, lambda x: x.sum(keepdims=True), "sum"),
        ("Rsqrt", [1e-8, 1.0], lambda x: 1 / np.sqrt(x), "division"),
        ("_npi_true_divide", [1e-8, 1.0], lambda x: x[1:] / x[:1], "division"),
        ("RealDiv", [1e-8, 0.0], lambda x: x[1:] / x[:1], "division"),
        ("div", [1e-8, 1.0], lambda x: x[1:] / x[:1], "division"),
        ("masked_fill", [1.0, -1e9], lambda x: x, "mask"),
        ("SelectV2", [1.0, float(np.finfo(np.float32).min)], lambda x: x, "mask"),
        ("log", [1e-9, 0.5], np.log, "logarithm"),
        ("broadcast_power", [300.0], np.square, "overflow"),
        ("cholesky", [1.0, 0.9998], lambda x: np.sqrt(x[:1] - x[1:]) if x[1] < 1 else x * math.nan, "digits"),
    ],
)
def test_an_operation_that_fails_only_in_low_precision_is_named_with_its_cause(operation, inputs, compute, kind):
    diagnosis = in_both(operation, inputs, compute)
    assert diagnosis.kind == kind
    assert not diagnosis.precision_is_innocent
    place = diagnosis.first_nonfinite
    assert (place.module, place.operation, place.direction, place.place) == ("block", operation, "forward", "net.py:7")
    assert diagnosis.last_finite.module == "before"
    assert diagnosis.advice
    assert "net.py:7" in str(diagnosis)


def test_a_quotient_of_zeros_is_a_division_though_rounding_has_moved_other_zeros():
    """A ReLU before it may give one zero less in low precision, so that counts of zeros are equal."""
    low = read("div", [0.0, 1.0, 0.0, 2.0], [math.nan, 0.5])
    exact = read("div", [0.0, 0.0, 1e-4, 2.0], [0.0, 0.0], dtype="float32")
    assert diagnosed(seen(low, loss=math.nan), seen(exact), "float16").kind == "division"


@pytest.mark.parametrize(
    ("operation", "inputs", "value", "kind"),
    [
        ("add", [0.0, 1.0], [1e-8, 1.0], "epsilon"),
        ("_plus_scalar", [1e-12, 1.0], [1.001e-9, 1.0], "epsilon"),
        ("AddV2", [0.0, 1.0, 1e-8], [1e-8, 1.0], "epsilon"),  # the constant is a tensor
        ("clamp_min", [0.0, 1.0], [1e-12, 1.0], "epsilon"),
        ("_maximum_scalar", [1e-8, 1.0], [1e-8, 1.0], "epsilon"),  # where float32 needs no bound
        ("scale", [0.0, 1.0], [1e-8, 1.0], "epsilon"),  # Paddle's, which adds as well
        ("sqrt", [1e-20, 1.0], [1e-10, 1.0], "division"),
        ("mul", [1e-4, 1.0], [1e-8, 1.0], "division"),  # of 1e-4 and 1e-4
        ("add", [4e-9, 0.5, 6e-9, 0.5], [1e-8, 1.0], "division"),  # of two tensors
        ("add", [-1.0, 1.0], [1e-9, 2.0], "division"),  # 1 is added
        ("softmax", [0.0, 35.0], [6e-16, 0.99], "division"),  # nothing is added to its zeros
    ],
)
def test_an_epsilon_is_a_constant_that_rounds_to_zero(operation, inputs, value, kind):
    exact = [read(operation, inputs, value, dtype="float32"), read("div", [*value, 5.0], [5e8, 5.0], dtype="float32")]
    low = [read(operation, round_to(inputs, "float16"), [0.0, 1.0]), read("div", [0.0, 1.0, 5.0], [math.inf, 5.0])]
    diagnosis = diagnosed(seen(*low, loss=math.inf), seen(*exact), "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == (kind, "div")
    flushed = f"{operation} in module 'block' (net.py:7) rounds numbers down to {value[0]:.2g} to zero"
    assert (flushed in diagnosis.why) == (kind == "division")


@pytest.mark.parametrize(
    ("operation", "kind", "values"), [("log", "logarithm", (-7, 0)), ("rsqrt", "division", (32, 1))]
)
@pytest.mark.parametrize(("smallest", "underflows"), [(1e-3, False), (1e-9, True)])
def test_a_zero_underflows_only_where_the_dtype_does_not_hold_it(operation, kind, values, smallest, underflows):
    """What another module has made zero of numbers that float16 holds is not flushed."""
    exact = read(operation, [smallest, 1.0], values, dtype="float32")
    low = read(operation, [0.0, 1.0], [math.inf, values[1]])
    fault = find_fault(seen(low, loss=math.inf), seen(exact), "float16", 1.0)
    assert fault.kind == kind
    assert ("underflows" in fault.why or "smallest number" in fault.why) == underflows
    assert fault.cancels is not underflows  # so that the module before it is asked about


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ([0.0, 1.0, 1e-5, 1.0, 1.0], "overflow"),  # 1 / 1e-5, for 1 - x has lost its digits
        ([0.0, 0.0, 1.0, 0.5, 1.0], "division"),
    ],
)
def test_a_divisor_is_zero_where_nothing_else_overflows(inputs, kind):
    exact = read("div", [0.0, 1.0, 6e-5, 1.0, 1.0], [0.0, 1.6e4], dtype="float32")
    low = read("div", inputs, [0.0, math.inf])
    assert diagnosed(seen(low, loss=math.inf), seen(exact), "float16").kind == kind


def test_what_is_divided_may_be_zero_where_the_divisor_is_not():
    """`x / 1e-5` of an `x` some of which flushes: what is infinite is too large."""
    exact = read("div", [1e-9, 10.0], [1e-4, 1e6], dtype="float32")
    low = read("div", [0.0, 10.0], [0.0, math.inf])
    diagnosis = diagnosed(seen(low, loss=math.inf), seen(exact), "float16")
    assert diagnosis.kind == "overflow"
    assert "it is 1e+06 in float32, and float16's largest number is 65504" in diagnosis.why


def test_a_cast_that_overflows_is_an_overflow_though_float32_has_no_such_cast():
    cast = read("_to_copy", [1e5], [math.inf])
    diagnosis = diagnosed(seen(cast, loss=math.inf), seen(read("add", [1.0], [1e5])), "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == ("overflow", "_to_copy")
    assert diagnosed(seen(read("Cast", [-1e9, 0.0], [-math.inf]), loss=math.nan), seen(), "float16").kind == "mask"
    slope = read("_backward_amp_cast", [], [math.inf], direction="backward")  # of which MXNet shows no inputs
    unseen = diagnosed(seen(slope, gradients=[math.inf]), seen(), "float16")
    assert (unseen.kind, "overflows float16: it casts larger numbers" in unseen.why) == ("overflow", True)


def test_a_mask_of_minus_infinity_is_meant_and_what_fails_behind_it_is_named():
    mask = read("masked_fill", [1.0], [-math.inf, 1.0])
    broken, sound = read("exp", [20.0], [math.inf]), read("exp", [20.0], [math.exp(20)])
    assert diagnosed(seen(mask), seen(mask), "float16").kind == "healthy"
    assert diagnosed(seen(mask, broken, loss=math.inf), seen(mask, sound), "float16").first_nonfinite.operation == "exp"
    both = diagnosed(
        seen(mask, broken, loss=math.inf), seen(mask, read("log", [0.0], [-math.inf]), loss=math.inf), "float16"
    )
    assert (both.kind, both.first_nonfinite.operation) == ("logarithm", "log")


def test_a_backward_pass_that_overflows_is_told_from_a_scale_that_is_too_large():
    forward = read("", [1.0], [1.0])
    low = seen(forward, read("", [], [math.inf], direction="backward"), gradients=[math.inf])
    large = seen(forward, read("", [], [1e5], direction="backward", dtype="float32"))
    small = seen(forward, read("", [], [10.0], direction="backward", dtype="float32"))
    fault = find_fault(low, large, "float16", 8.0, low)
    assert (fault.kind, fault.place.direction) == ("overflow", "backward")
    scaled = examined(Suspect(low, small, Setting("float16", 2.0**16), lambda change, modules: small))
    assert (scaled.kind, scaled.precision_is_innocent) == ("loss scale", True)


def test_a_scale_that_is_too_large_is_not_why_a_forward_pass_is_wrong():
    """`1 - x * x` of an `x` that rounds to 1 is zero; only the loss scale makes a sum on the way back overflow."""

    def run(dtype, difference, loss, largest):
        forward = (sampled("rsub", [1.0, 0.996], difference, dtype), sampled("", [1.0, 1.0], [loss, loss], dtype))
        slope = read("sum", [largest / 64] * 64, [largest], "critic", "backward", dtype)
        return seen(*forward, slope, loss=loss, gradients=[largest])

    low, settled, reference = (
        run(*values)
        for values in (
            ("float16", [0.0, 0.004], 9.0, math.inf),
            ("float16", [0.0, 0.004], 9.0, 64.0),
            ("float32", [3e-3, 0.004], 6.0, 64.0),
        )
    )
    fault = find_fault(low, reference, "float16", 1e3, settled)
    assert (fault.kind, fault.place.operation, fault.stays_finite) == ("digits", "rsub", True)


def test_the_derivative_of_a_root_at_zero_is_told_by_the_forward_pass():
    root = read("sqrt", [0.0, 1.0], [0.0, 1.0])
    failing = seen(root, read("div", [1.0], [math.inf], direction="backward"), gradients=[math.nan])
    diagnosis = diagnosed(failing, failing, "float16")
    assert (diagnosis.kind, diagnosis.float32_fails) == ("logarithm", True)
    assert "1 of 2 inputs of sqrt are zero, where its derivative is infinite" in diagnosis.why
    slope = read("div", [1.0], [31.6], direction="backward", dtype="float32")
    fault = find_fault(failing, seen(read("sqrt", [1e-3, 1.0], [0.03, 1.0]), slope), "float16", 1.0)
    assert (fault.kind, fault.cancels) == ("logarithm", False)  # the place is where the root is


def test_a_norm_of_numbers_of_which_some_are_zero_has_a_derivative():
    """It is `x / norm`, and of no matter how many zeros; a power of zero has one where its exponent is not below 1."""
    slope, finite = (read("div", [], [value], direction="backward") for value in (math.inf, 1e6))
    healthy = seen(read("linalg_vector_norm", [1e-9, 3.0, 4.0], [5.0]), finite)
    for received, length, kind in (([0.0, 3.0, 4.0], 5.0, "overflow"), ([0.0, 0.0, 0.0], 0.0, "logarithm")):
        low = seen(read("linalg_vector_norm", received, [length]), slope, gradients=[math.inf])
        assert find_fault(low, healthy, "float16", 1.0).kind == kind
    cubes = [read("pow", [3e-3, 300.0], [3e-8, 2.7e7]), read("pow", [], [3e5], direction="backward")]
    low = [read("pow", [0.0, 3.0], [0.0, 27.0]), read("pow", [], [math.inf], direction="backward")]
    fault = find_fault(seen(*low, gradients=[math.inf]), seen(*cubes), "float16", 1.0)
    assert "where its derivative may be infinite" in fault.why


IN_NUMPY = {
    **{"acos": np.arccos, "acosh": np.arccosh, "atanh": np.arctanh, "logit": lambda x: np.log(x / (1 - x))},
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


@pytest.mark.parametrize(
    ("operation", "numbers", "says", "exact", "words"),
    [
        ("acos", [-0.5, 1.001], "1", [-0.5, 0.9998], "its largest input is 0.9998 in float32, and loses precision in"),
        ("acosh", [2.0, -3.5], "-3.5", [2.0, 1.0005], "its lowest input is 1.0005 in float32"),
        ("log1p", [-0.5, -1.5], "-1.5", [-0.5, -0.75], "its lowest input is -0.75 in float32"),
        ("sqrt", [2.0, -0.25], "-0.25", [2.0, 0.0], "its lowest input is 0 in float32"),
        ("rsqrt", [2.0, -0.25], "-0.25", [2.0, 1e-3], "its lowest input is 0.001 in float32"),
        ("logit", [0.5, 1.25], "1.25", [0.5, 0.999], "its largest input is 0.999 in float32"),
        ("log", [2.0, -0.25], "-0.25", [2.0, -0.24], ""),  # which the script itself then mends
        ("atanh", [0.5, 1.25], "1.25", [0.5, 1.5], ""),
        ("log", [2.0, -0.25], "-0.25", [], ""),  # of float32 nothing is known
    ],
)
def test_what_is_not_defined_is_said_with_the_number_it_is_not_defined_for(operation, numbers, says, exact, words):
    """NumPy, which has a NaN for that number alone, is the oracle: of float32, too, it has one, or it is digits."""
    compute = IN_NUMPY.get(operation) or getattr(np, operation)
    with np.errstate(all="ignore"):
        values, healthy = compute(np.array(numbers)), compute(np.array(exact))
    assert list(np.isnan(values)) == [False, True]
    low = seen(read(operation, numbers, values), loss=math.nan)
    reference = seen(read(operation, exact, np.nan_to_num(healthy), dtype="float32"))
    fault = find_fault(low, reference, "float16", 1.0)
    assert fault.kind == ("logarithm" if np.isnan(healthy).any() or not exact else "digits")
    assert f"is NaN: {operation} of {says} is not defined" in fault.why
    assert words in fault.why


def test_the_difference_that_lost_its_sign_is_why_something_is_not_defined_at_any_pole():
    """As `acosh(1 + 2 / (1 - x * x))` of an `x` that rounds beyond 1."""
    low = [read("sub", [1.0, 1.0005], [-5e-4]), read("acosh", [-4e3, 2.0], [math.nan, 1.3])]
    healthy = [read("sub", [1.0, 0.9998], [2e-4]), read("acosh", [1e4, 2.0], [9.9, 1.3])]
    fault = find_fault(seen(*low, loss=math.nan), seen(*healthy), "float16", 1.0)
    assert fault.kind == "digits"
    assert "is NaN: acosh of -4e+03 is not defined, because sub in module 'block' (net.py:7) subtracts" in fault.why


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("operation", "exact", "slope"),
    [
        ("log", 1e-9, lambda x: 1 / x),
        ("sqrt", 1e-9, lambda x: 0.5 / math.sqrt(x)),
        ("log1p", -0.99999, lambda x: 1 / (1 + x)),
        ("acosh", 1.00001, lambda x: 1 / math.sqrt(x * x - 1)),
        ("acos", -0.99999, lambda x: -1 / math.sqrt(1 - x * x)),
        ("atanh", 0.99999, lambda x: 1 / (1 - x * x)),
        ("logit", 0.99999, lambda x: 1 / (x * (1 - x))),
    ],
)
def test_the_bound_that_is_advised_keeps_numbers_from_the_poles_of_the_function(dtype, operation, exact, slope):
    """What is rounded to a pole in a dtype has a derivative there, by the formula, once it is clipped as advised."""
    pole = float(round(exact))
    gradients = [read("mul", [], [value], direction="backward") for value in (math.inf, 1e4)]
    low = seen(read(operation, [pole, 0.5], [0.0, 0.7]), gradients[0], gradients=[math.inf])
    healthy = seen(read(operation, [exact, 0.5], [1e-4, 0.7]), replace(gradients[1], operation="mul"))
    diagnosis = diagnosed(low, healthy, dtype)
    assert diagnosis.kind == "logarithm"
    line = next(line for line in diagnosis.advice.splitlines() if ".clip(" in line)
    clipped = {}
    exec(line, {"x": np.array([pole])}, clipped)
    assert math.isfinite(slope(float(round_to(clipped["x"], dtype)[0])))


def test_a_root_of_a_difference_that_is_zero_for_want_of_digits_is_no_matter_of_the_root():
    """`sqrt(1 - x * x)` of an `x` that rounds to 1: on the way back it is infinite."""
    slope = read("_backward_sqrt", [], [math.inf], direction="backward")
    low = [read("_rminus_scalar", [1.0, 0.5], [0.0, 0.5]), read("sqrt", [0.0, 0.5], [0.0, 0.7]), slope]
    healthy = [read("_rminus_scalar", [0.9998, 0.5], [2e-4, 0.5]), read("sqrt", [2e-4, 0.5], [0.014, 0.7])]
    healthy.append(read("_backward_sqrt", [], [35.0], direction="backward"))
    fault = find_fault(seen(*low, gradients=[math.inf]), seen(*healthy), "float16", 1.0)
    assert fault.kind == "digits"
    assert (
        "where its derivative is infinite, because _rminus_scalar in module 'block' (net.py:7) subtracts" in fault.why
    )


def test_what_divides_gradients_by_the_loss_scale_is_not_where_they_fail():
    """MXNet shows it before the backward pass, of which it tells when the step has ended."""
    unscales = read("_div_scalar", [math.nan, 1.0], [math.nan, 1.0], module="")
    slope = read("_backward_log", [], [math.inf], direction="backward")
    finite = read("_backward_log", [], [10.0], direction="backward")
    fault = find_fault(seen(unscales, slope, gradients=[math.nan]), seen(finite), "float16", 8.0)
    assert fault.place.operation == "_backward_log"
    alone = find_fault(seen(unscales, gradients=[math.nan]), seen(), "float16", 8.0)
    assert "divides by zero" not in alone.why  # NaN by a scale is NaN


@pytest.mark.parametrize(
    ("operation", "exact_input", "low_input", "words"),
    [
        ("Log1p", -0.999999, -1.0, "it is infinite at -1, to which bfloat16 rounds its input"),
        ("atanh", 0.9999, 1.0, "it is infinite at 1, to which bfloat16 rounds its input"),
        ("_npi_arctanh", -0.9999, -1.0, "it is infinite at -1, to which"),
        ("erfinv", 0.9999, 1.0, "it is infinite at 1, to which"),
        ("logit", 0.9999, 1.0, "it is infinite at 1, to which"),
        ("log", 1e-9, 0.0, "it takes the logarithm of zero"),
    ],
)
def test_an_operation_is_infinite_at_its_own_pole_and_does_not_overflow(operation, exact_input, low_input, words):
    finite = read(operation, [exact_input, 0.5], [12.0, 0.5], dtype="float32")
    fault = find_fault(
        seen(read(operation, [low_input, 0.5], [math.inf, 0.5]), loss=math.inf), seen(finite), "bfloat16", 1.0
    )
    assert fault.kind == "logarithm"
    assert words in fault.why


@pytest.mark.parametrize(
    ("guard", "operation", "before", "exact_input", "low_input", "words"),
    [
        ("add", "sqrt", 0.0, 1e-8, 0.0, "because the constant 1e-08 of add in module 'block' (net.py:7) is zero in"),
        ("clamp_min", "sqrt", 0.0, 1e-8, 0.0, "because the constant 1e-08 of clamp_min in"),
        ("clamp", "acos", 0.9999, 0.9999, 1.0, "because clamp in module 'block' (net.py:7) does not keep them from 1"),
        ("mul", "acos", 0.9999, 0.9999, 1.0, ""),
        ("scale", "sqrt", 0.0, 1e-3, 0.0, ""),  # float16 holds it, whatever is added
    ],
)
def test_a_constant_that_rounds_to_the_pole_it_was_to_keep_values_from_is_an_epsilon(
    guard, operation, before, exact_input, low_input, words
):
    slope, finite = (read(f"{operation}_backward", [], [value], direction="backward") for value in (math.inf, 1e4))
    low = [read(guard, [low_input, 0.5], [low_input, 0.5]), read(operation, [low_input, 0.5], [0.0, 0.7])]
    exact = [read(guard, [before, 0.5], [exact_input, 0.5]), read(operation, [exact_input, 0.5], [1e-4, 0.7])]
    fault = find_fault(seen(*low, slope, gradients=[math.inf]), seen(*exact, finite), "float16", 1.0)
    assert (fault.kind, fault.place.direction) == ("epsilon" if words else "logarithm", "backward")
    assert words in fault.why
    assert ("because" in fault.why) == bool(words)


@pytest.mark.parametrize(
    ("dtype", "smallest", "kind"),
    [("float32", 1e-12, "flush"), ("float32", 1e-3, "logarithm"), ("float16", 1e-12, "logarithm")],
)
def test_a_root_in_float32_at_zero_that_was_flushed_before_is_told_from_its_own_zero(dtype, smallest, kind):
    slope, finite = (read("div", [], [value], direction="backward", dtype="float32") for value in (math.inf, 1e4))
    low = seen(read("sqrt", [0.0, 0.0], [0.0, 0.0], dtype=dtype), slope, gradients=[math.inf])
    exact = seen(read("sqrt", [smallest, smallest], [1e-2, 1e-2], dtype="float32"), finite)
    assert find_fault(low, exact, "float16", 1.0).kind == kind


def test_a_logarithm_of_zero_is_an_epsilon_where_a_constant_was_to_prevent_it():
    low = [read("add", [0.0, 0.5], [0.0, 0.5]), read("log", [0.0, 0.5], [-math.inf, -0.7])]
    exact = [read("add", [0.0, 0.5], [1e-8, 0.5]), read("log", [1e-8, 0.5], [-18.4, -0.7])]
    diagnosis = diagnosed(seen(*low, loss=math.inf), seen(*exact), "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == ("epsilon", "log")
    assert "eps = 0.0001  # float16 holds it; next to 1 it needs 0.001" in diagnosis.advice


def test_the_slope_of_an_operation_at_its_own_pole_is_told_by_the_forward_pass():
    slope, finite = (read("log1p_backward", [], [value], direction="backward") for value in (math.inf, 1e5))
    low = seen(read("log1p", [-1.0], [-20.0]), slope, gradients=[math.inf])
    fault = find_fault(low, seen(read("log1p", [-0.9999], [-9.2]), finite), "bfloat16", 1.0)
    assert "inputs of log1p are -1, where its derivative is infinite" in fault.why


@pytest.mark.parametrize(("divided", "kind"), [(1.7e4, "overflow"), (0.0, "flush")])
def test_a_quotient_of_a_divisor_that_is_infinite_has_not_lost_digits(divided, kind):
    """An integer of 70,300 is infinite in float16, and what the operation receives does not show it."""
    reference = seen(sampled("div", [1.7e4] * 4, [0.25] * 4, "float32", ""), loss=2.0)
    low = seen(sampled("div", [divided] * 4, [0.0] * 4, module=""), loss=1.0)
    fault = find_fault(low, reference, "float16", 1.0)
    assert (fault.kind, "is zero: its divisor overflows float16" in fault.why) == (kind, kind == "overflow")


def test_what_no_loss_scale_cures_is_looked_for_at_a_scale_of_one():
    """The scale itself overflows a cast, say, behind which the fault is hidden."""
    forward = read("div", [1.0], [1.0])
    finite = read("div_backward", [], [9e5], direction="backward", dtype="float32")
    reference = seen(replace(forward, dtype="float32"), finite, gradients=[9e5])

    def low(scale):
        cast = read("_to_copy", [], round_to([scale], "float16"), direction="backward")
        return seen(forward, cast, read("div_backward", [], [math.inf], direction="backward"), gradients=[math.inf])

    def again(change, modules):
        return reference if change.float32 or change.dtype else low(change.scale)

    diagnosis = examined(Suspect(low(2.0**17), reference, Setting("float16", 2.0**17), again))
    assert (diagnosis.first_nonfinite.operation, diagnosis.scale) == ("div_backward", 1.0)
    assert "9e+05 in float32, and float16's largest number is 65504" in diagnosis.why


FAILS = {"loss": math.nan, "gradients": [math.nan]}
exact = functools.partial(read, dtype="float32")


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (seen(exact("matmul", [1.0, math.nan], [math.nan]), **FAILS), "data"),
        (seen(exact("matmul", [1e25], [math.inf]), **FAILS), "data"),
        (seen(exact("matmul", [1.0], [math.nan]), weights=[math.nan], **FAILS), "weights"),
        (seen(exact("matmul", [1e30], [math.inf]), weights=[1e30], **FAILS), "learning rate"),
        (seen(exact("custom", [1.0], [math.nan]), **FAILS), "model"),
        (seen(exact("div", [0.0, 1.0], [math.inf]), **FAILS), "division"),
        (seen(exact("log", [-1.0], [math.nan]), **FAILS), "logarithm"),
        (seen(**FAILS), "model"),
    ],
)
def test_precision_is_innocent_where_float32_fails_too(run, kind):
    diagnosis = diagnosed(run, run, "float16")
    assert diagnosis.kind == kind
    assert diagnosis.precision_is_innocent
    untried = diagnosis.advice.startswith("# may cure it, and was not tried:\n")
    assert untried == (kind not in ("data", "model"))
    assert json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))["precision_is_innocent"]


def test_large_numbers_are_not_why_float32_takes_the_logarithm_of_zero():
    for operation, value, kind in (("log", -math.inf, "logarithm"), ("square", math.inf, "data")):
        large = exact("matmul", [1e25], [1.0])
        broken = exact(operation, [0.0, 1.0], [value, 0.0])
        assert diagnosed(*2 * [seen(large, broken, weights=[1.0], **FAILS)], "float16").kind == kind
        heavy = seen(broken, weights=[1e30], **FAILS)
        assert diagnosed(heavy, heavy, "float16").kind == ("learning rate" if kind == "data" else kind)


def test_inputs_whose_squares_float32_holds_are_not_too_large():
    run = seen(exact("matmul", [1e18], [math.inf]), **FAILS)
    assert diagnosed(run, run, "float16").kind == "model"


def test_missing_readings_that_are_replaced_are_not_why_float32_fails():
    missing = [exact("sub", [1.0, math.nan], [0.5, math.nan]), exact("nan_to_num", [0.5, math.nan], [0.5, 0.0])]
    run = seen(*missing, exact("log", [0.0, 1.0], [-math.inf, 0.0]), **FAILS)
    diagnosis = diagnosed(run, run, "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == ("logarithm", "log")
    # What one column is made of says nothing of the others.
    run = seen(*missing, exact("mean", [0.5, math.nan], [math.nan]), **FAILS)
    diagnosis = diagnosed(run, run, "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == ("data", "sub")
    assert "the batch, or what a former step left, is not finite" in diagnosis.why  # no model received them


@pytest.mark.parametrize(
    ("operation", "inputs", "kind"),
    [
        ("mul", [-math.inf, 0.0], "mask"),  # a mask times a gate that is zero
        ("mul", [math.nan, 0.0], "weights"),
        ("addmm", [math.inf, 0.0], "weights"),
    ],
)
def test_infinities_of_a_module_are_a_mask_where_no_weight_is_read(operation, inputs, kind):
    network = exact("", [1.0], [math.nan], module="")
    run = seen(exact(operation, inputs, [math.nan, 0.0]), network, **FAILS)
    diagnosis = diagnosed(run, run, "float16")
    assert diagnosis.kind == kind
    assert ("may have written" in diagnosis.why) == (kind == "weights")


@pytest.mark.parametrize(("inputs", "kind"), [([-math.inf] * 4, "mask"), ([1.0, 2.0, math.inf, 3.0], "data")])
def test_a_row_is_masked_whole_only_if_as_much_of_it_is_infinite_as_becomes_nan(inputs, kind):
    run = seen(exact("_softmax", inputs, [math.nan] * 4), **FAILS)
    assert diagnosed(run, run, "float16").kind == kind


@pytest.mark.parametrize(
    ("operation", "direction", "inputs", "compute", "words"),
    [
        ("mul", "forward", [-math.inf, 0.0], np.multiply, "an infinity of a mask is multiplied by zero"),
        ("elemwise_mul", "backward", [0.0, -math.inf], np.multiply, "an infinity of a mask is multiplied by zero"),
        ("sub", "forward", [-math.inf, -math.inf], np.subtract, "infinities of a mask are subtracted from each other"),
        ("AddV2", "forward", [math.inf, -math.inf], np.add, "infinities of a mask are subtracted from each other"),
        ("_softmax", "forward", [-math.inf, -math.inf], lambda x, y: np.exp(x - y), "all of a row is masked by -inf"),
        ("div", "forward", [-math.inf, math.inf], np.divide, "of the infinities of a mask it computes what is not"),
        ("dot_general", "forward", [-math.inf, math.inf], np.add, "of the infinities of a mask it computes what is"),
    ],
)
def test_what_makes_nan_of_the_infinities_of_a_mask_is_said_as_it_was_computed(
    operation, direction, inputs, compute, words
):
    """NumPy, which has NaN for that, too, is the oracle."""
    with np.errstate(invalid="ignore"):
        value = compute(*map(np.array, inputs))
    assert np.isnan(value)
    mask = exact("masked_fill", [1.0, 2.0], [1.0, *filter(math.isinf, inputs)])
    broken = replace(exact(operation, inputs, [value]), direction=direction)
    diagnosis = diagnosed(*2 * [seen(mask, broken, **FAILS)], "float16")
    assert diagnosis.kind == "mask"
    assert words in diagnosis.why
    assert ("a row" in diagnosis.why) == (operation in ("_softmax", "sub", "AddV2"))


def test_a_root_of_zeros_that_float32_has_too_is_not_why_a_gradient_overflows():
    root = read("sqrt", [0.0, 1.0], [0.0, 1.0])
    back = {"direction": "backward", "module": "block"}
    low = seen(root, read("div", [1.0], [math.inf], **back), gradients=[math.inf])
    sound = seen(exact("sqrt", [0.0, 1.0], [0.0, 1.0]), exact("div", [1.0], [1e5], **back))
    assert find_fault(low, sound, "float16", 1.0, low).kind == "overflow"


def test_risks_are_constants_and_losses_in_low_precision_and_no_shapes():
    reference = seen(read("where", [1.0, -1e9], [1.0, -1e9]), gradients=np.ones((8, 10)))
    low = seen(read("softmax", [1.0], [1.0]), read("mse_loss", [1.0], [1.0]), gradients=np.ones((8, 10)))
    diagnosis = diagnosed(low, reference, "float16")
    assert diagnosis.kind == "healthy"
    assert [risk.kind for risk in diagnosis.risks] == ["constant", "loss"]


@pytest.mark.parametrize(
    ("operation", "inputs", "value", "kinds"),
    [("matmul", [300.0], [9e4], []), ("where", [1.0, -1e9], [-1e9, 1.0], ["constant"])],
)
def test_a_constant_beyond_the_dtype_bears_on_a_mask_and_on_no_product(operation, inputs, value, kinds):
    """Both are in one module, as the scores of attention and their mask are."""
    mask = ("where", [1.0, -1e9], [-1e9, 1.0])
    exact_step = seen(exact(operation, inputs, value), exact(*mask, call=1))
    low = seen(read(operation, inputs, [-math.inf, 1.0]), read(*mask[:2], [-math.inf, 1.0], call=1), loss=math.nan)
    diagnosis = diagnosed(low, exact_step, "float16")
    assert diagnosis.kind == ("mask" if kinds else "overflow")
    assert [risk.kind for risk in diagnosis.risks] == kinds


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("sum ReduceSum Sum _npi_sum reduce_sum mean", "sum"),
        ("aten::mm dot_general BatchMatMulV2 FullyConnected matmul_v2 Conv2D conv_general_dilated", "matmul"),
        ("div RealDiv broadcast_div elementwise_div _rdiv_scalar rsqrt Reciprocal divide", "division"),
        ("_to_copy convert_element_type Cast amp_cast", "cast"),
        ("native_layer_norm LayerNorm FusedBatchNormV3", "norm"),
        ("masked_fill_ select_n SelectV2 where", "mask"),
        ("view squeeze_ ExpandDims _npi_transpose reshape2 concat StridedSlice broadcast_in_dim SliceChannel", "move"),
        ("sqrt linalg_vector_norm p_norm", "root"),
        ("cholesky linalg_cholesky_ex _linalg_solve_ex linalg_inv_ex MatrixInverse lu", "decomposition"),
        ("log Log1p _npi_log _backward_log", "logarithm"),
        ("exp pow _backward__power_scalar _backward_broadcast_power", "exponential"),
        ("relu add tanh AddV2 _softmax log_softmax", "other"),
    ],
)
def test_operations_of_all_frameworks_are_known_by_what_they_do(names, expected):
    assert {name: family(name) for name in names.split()} == dict.fromkeys(names.split(), expected)


def model(*weights, **more):
    layers = {f"layer{index}": Dense(Tensor([w], parameter=True)) for index, w in enumerate(weights)}
    return Module(**layers, **more)


def step_of(*inputs):
    return lambda model: total(model(Tensor(inputs)))


@pytest.mark.parametrize(
    ("weights", "inputs", "kind", "module", "direction"),
    [
        ((2.0, 300.0, 400.0, 2.0**-9), (1.0, 2.0), "overflow", "layer2", "forward"),
        ((2.0**-8, 2.0**-8, 500.0, 500.0), (1.0, 2.0), "overflow", "layer2", "backward"),
        ((1.0, 1.0), (1.0, math.nan), "data", "layer0", "forward"),
        ((1.0, 1e30, 1e30), (1.0, 2.0), "learning rate", "layer2", "forward"),
    ],
)
def test_a_planted_fault_of_a_model_is_named_in_code(weights, inputs, kind, module, direction):
    toy = model(*weights)
    before = framework.generator.getstate(), [parameter.data for _, parameter in toy.named_parameters()]
    diagnosis = ampx.diagnose(step_of(*inputs), toy, framework="toy", dtype="float16")
    place = diagnosis.first_nonfinite
    assert (diagnosis.kind, place.module, place.direction, place.operation) == (kind, module, direction, "product")
    assert before == (framework.generator.getstate(), [parameter.data for _, parameter in toy.named_parameters()])


def test_a_scale_that_is_too_large_for_a_sound_model_is_no_fault():
    diagnosis = ampx.diagnose(step_of(1.0), model(2.0, 300.0), framework="toy", dtype="float16", loss_scale=2.0**16)
    assert diagnosis.kind == "loss scale"
    assert diagnosis.advice == ""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "float32"])
def test_clean_models_are_accused_of_nothing(dtype):
    source = np.random.default_rng(0)
    for _ in range(10):
        toy = model(*source.uniform(0.5, 2.0, 4), dropout=Dropout())
        diagnosis = ampx.diagnose(step_of(*source.normal(size=16)), toy, framework="toy", dtype=dtype)
        assert (diagnosis.kind, diagnosis.risks, diagnosis.first_nonfinite) == ("healthy", (), None)
        assert diagnosis.precision_is_innocent


def test_a_place_without_operations_is_named_by_its_module():
    low = Reading("deep.block", "Linear", "", "forward", 0, "float16", describe([math.inf]), describe([1.0]))
    exact = Reading("deep.block", "Linear", "", "forward", 0, "float32", describe([1e6]), describe([1.0]))
    diagnosis = diagnosed(seen(low, loss=math.inf), seen(exact), "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("overflow", "deep.block")
    assert "deny=['module:deep.block']" in diagnosis.advice
    assert diagnosis.last_finite is None


def sampled(operation, inputs, value, dtype="float16", module="block"):
    return replace(read(operation, inputs, value, module, dtype=dtype), sample=np.asarray(value, np.float32))


def divided_by_its_length(values, dtype):
    """Return the readings of `x / sqrt(sum(x * x))` in a dtype, its module, and a module behind it."""
    with np.errstate(all="ignore"):
        x = round_to(values, dtype)
        squares = round_to(x * x, dtype)
        total_of = round_to(squares.sum(keepdims=True), dtype)
        length = round_to(np.sqrt(total_of), dtype)
        result = round_to(x / length, dtype)
    steps = (("mul", x, squares), ("sum", squares, total_of), ("div", length, result))
    return [sampled(name, *pair, dtype) for name, *pair in steps] + [sampled("", x, result, dtype)]


@pytest.mark.parametrize(
    ("values", "kind", "operation"),
    [([3e3, 4e3], "overflow", "mul"), ([250.0] * 4, "sum", "sum"), ([3.0, 4.0], "healthy", None)],
)
def test_an_infinity_that_becomes_a_zero_is_named_though_the_loss_is_finite(values, kind, operation):
    values = np.array(values, np.float32)
    low, exact = (seen(*divided_by_its_length(values, dtype)) for dtype in ("float16", "float32"))
    diagnosis = diagnosed(low, exact, "float16")
    assert diagnosis.kind == kind
    assert diagnosis.precision_is_innocent is (kind == "healthy")
    if operation is not None:
        assert diagnosis.first_nonfinite.operation == operation
        assert "the loss stays finite, 0 % from float32's" in diagnosis.why
        assert "deny=['module:block']" in diagnosis.advice


def test_values_that_flush_to_zero_and_digits_that_cancel_are_named_though_the_loss_is_finite():
    small, module = np.array([1e-9, 2e-9], np.float32), np.array([1.0, 2.0], np.float32)
    exact = seen(sampled("mul", small, small, "float32"), sampled("", small, module, "float32"))
    low = seen(sampled("mul", small, 0 * small), sampled("", small, 0 * module))
    flushed = diagnosed(low, exact, "float16")
    assert (flushed.kind, flushed.first_nonfinite.operation) == ("flush", "mul")
    assert "2 of 2 elements are zero in float16" in flushed.why
    assert "whose smallest number is 6e-08" in flushed.why
    large = seen(sampled("floor", module, module, "float32"), sampled("", module, module, "float32"))
    low = seen(sampled("floor", 0.99 * module, 0 * module), sampled("", module, 0 * module))
    rounded = diagnosed(low, large, "float16")
    assert (rounded.kind, rounded.first_nonfinite.operation) == ("digits", "floor")  # float16 holds 1 and 2
    assert "too few for the numbers that it is computed from" in rounded.why
    low = seen(sampled("sub", [4096.0], [1.0, 3.0]), sampled("", [1.0], 1.5 * module))
    exact = seen(sampled("sub", [4096.0], [1.0, 2.0], "float32"), sampled("", [1.0], module, "float32"))
    cancelled = diagnosed(low, exact, "float16")
    assert (cancelled.kind, cancelled.first_nonfinite.operation) == ("digits", "sub")
    assert (
        "the output of sub in module 'block' (net.py:7) loses precision: it is 45 % from float32's, " in cancelled.why
    )


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ([100.0, 100.0, 100.0, 100.0], "digits"),  # float16 has steps of 0.06 there
        ([0.0, 0.0, 1.0, 0.0], "flush"),  # the terms were
    ],
)
def test_a_difference_of_equal_numbers_is_not_flushed(inputs, kind):
    """What float16 cannot hold of `100.01 - 100` is in 100.01: a difference is exact where it is small."""
    exact = np.array([0.01, 0.02], np.float32)
    terms = [100.01, 100.02, 100.0, 100.0] if kind == "digits" else [1e-9, 2e-9, 1.0, 3e-9]
    reference = seen(sampled("sub", terms, exact, "float32"), sampled("", terms, exact, "float32"))
    low = seen(sampled("sub", inputs, 0 * exact), sampled("", inputs, 0 * exact))
    diagnosis = diagnosed(low, reference, "float16")
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == (kind, "sub")
    assert ("elements are zero" in diagnosis.why) == (kind == "flush")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Stats(4, largest=3.0, smallest=0.5, lowest=-3.0), "values of magnitude 0.5 to 3, lowest -3"),
        (Stats(4, zeros=4), "zeros"),
        (Stats(4, 1, largest=3.0, smallest=0.5), "1 of 4 infinite, the others of magnitude 0.5 to 3, lowest 0"),
        (Stats(4, 3, 2, zeros=1), "3 of 4 not finite, 2 of them NaN, the others zeros"),
        (Stats(4, 4, 4), "4 of 4 NaN"),
    ],
)
def test_a_bracket_says_what_its_values_are_and_no_range_where_nothing_is_finite(value, words):
    diagnosis = in_both("exp", [20.0], np.exp)
    place = replace(diagnosis.first_nonfinite, value=value, inputs=Stats())
    lines = str(replace(diagnosis, first_nonfinite=place)).splitlines()
    (line,) = (line for line in lines if line.startswith("  first"))
    assert line.endswith(f": {words}")


def test_an_infinity_that_does_no_harm_is_not_accused():
    mask = sampled("masked_fill", [1.0], [-math.inf, 1.0]), sampled("masked_fill", [1.0], [-1e9, 1.0], "float32")
    low, exact = (
        seen(entry, replace(entry, operation=""), sampled("softmax", [1.0], [0.0, 1.0], entry.dtype)) for entry in mask
    )
    assert diagnosed(low, exact, "float16").kind == "healthy"


def test_gradients_that_flush_to_zero_are_a_risk():
    low, exact = seen(gradients=[0.0, 1.0] * 8), seen(gradients=[1e-9, 1.0] * 8)
    (risk,) = diagnosed(low, exact, "float16", 4.0).risks
    assert (risk.kind, risk.where) == ("gradient", ("w",))
    assert "at a loss scale of 4" in risk.text
    assert diagnosed(exact, exact, "float16").risks == ()


@pytest.mark.parametrize(("dtype", "multiple", "odd"), [("float16", 8, 12), ("float8_e4m3", 16, 24)])
def test_dimensions_that_are_no_multiples_of_what_matrix_units_take_are_named(dtype, multiple, odd):
    note = padded([("w", (odd, 32)), ("b", (3,)), ("v", (32, 32))], dtype)
    assert note.startswith(f"Dimensions of w ({odd}x32) are no multiples of {multiple}:")
    assert padded([("w", (2 * odd if dtype == "float16" else 32, 32)), ("b", (3,))], dtype) is None


def test_constants_losses_and_normalizations_in_low_precision_are_risks():
    names = (
        ("mask", "masked_fill", [-1e9, 1.0]),
        ("clean", "native_layer_norm", [1.0, -1.0]),
        ("head", "nll_loss", [1.0]),
    )
    low, exact = (
        seen(*(sampled(name, [1.0], np.maximum(value, -60000.0), dtype, module) for module, name, value in names))
        if dtype == "float16"
        else seen(*(sampled(name, [1.0], value, dtype, module) for module, name, value in names))
        for dtype in ("float16", "float32")
    )
    # 100.01 and 100.02 in float16, normalized: their difference is 1/16 there, or nothing.
    low = seen(*low.readings, sampled("native_layer_norm", [100.0], [0.7, -0.7], "float16", "norm"))
    exact = seen(*exact.readings, sampled("native_layer_norm", [100.0], [1.0, -1.0], "float32", "norm"))
    risks = {risk.kind: risk.where for risk in diagnosed(low, exact, "float16").risks}
    assert risks == {"constant": ("mask",), "loss": ("head",), "normalization": ("norm",)}


@pytest.mark.parametrize(
    ("operation", "values", "count"),
    [("full", [1e-9] * 2, 1), ("full", [1e9] * 2, 1), ("full", [1e-3] * 2, 0), ("where", [1e-9, 1.0], 0)],
)
def test_constants_that_overflow_or_flush_are_risks_and_small_data_is_none(operation, values, count):
    exact = seen(sampled(operation, [1.0], values, "float32"))
    assert [risk.kind for risk in diagnosed(seen(), exact, "float16").risks] == ["constant"] * count


def test_a_framework_that_refuses_a_constant_in_low_precision_is_quoted():
    error = RuntimeError("value cannot be converted to Half without overflow\nat line 3")
    exact = seen(sampled("relu", [1.0], [1.0]), sampled("masked_fill", [1.0], [-1e9, 1.0], "float32"))
    for reached, what in ((exact.readings[:1], "the output of masked_fill"), ((), "the step cannot be computed in ")):
        refusal = Refusal(in_one_line(error), reached)  # what was not reached first is not known to be what raises
        diagnosis = examined(Suspect(refusal, exact, Setting("float16", 8.0)))
        assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == ("mask", "masked_fill")
        assert diagnosis.why.lower().startswith(what)
        assert ("may be for the output of masked_fill" in diagnosis.why) == (not reached)
    assert diagnosis.last_finite.operation == "relu"
    assert diagnosis.why.endswith("without overflow).")
    other = examined(Suspect(Refusal(in_one_line(ValueError(""))), seen(), Setting("float16", 8.0)))
    assert (other.kind, other.first_nonfinite, other.precision_is_innocent) == ("error", None, False)
    assert "ValueError: (no message)" in other.why


def test_an_error_that_begins_with_a_traceback_of_its_own_is_said_in_its_last_words():
    text = 'Traceback (most recent call last):\n  File "base.h", line 229\nRuntimeError: unknown type: 2'
    assert in_one_line(RuntimeError(text)) == "RuntimeError: unknown type: 2"


def test_an_error_that_keras_wraps_is_said_in_its_own_words():
    text = "Exception encountered when calling Norm.call().\n\n\x1b[1mRFFT requires float32\x1b[0m\n\nArguments: x"
    assert in_one_line(ValueError(text)) == "ValueError: RFFT requires float32"
    assert in_one_line(ValueError("Exception encountered when calling Norm.call().")).endswith("Norm.call().")


@pytest.mark.parametrize(
    ("module", "what"), [("waves", "the output of module 'waves' (train.py:3)"), ("", "the step (train.py:3)")]
)
def test_of_what_raises_the_line_is_named_and_not_an_operation_of_the_next(module, what):
    """What is computed at a line is not seen where it has no real numbers, as of a Fourier transform."""
    exact = seen(replace(sampled("mul", [1.0], [1.0], "float32", module), place="train.py:4"))
    diagnosis = examined(Suspect(Refusal("ValueError: no", (), "train.py:3"), exact, Setting("float16", 1.0)))
    assert diagnosis.why == f"{what} cannot be computed in float16, only in float32: ValueError: no."
    place = diagnosis.first_nonfinite
    assert (place.module, place.operation, place.place) == (module, "", "train.py:3")


def test_what_a_framework_refuses_is_the_first_value_that_only_float32_came_to():
    exact = seen(
        sampled("relu", [1.0], [1.0]),
        sampled("masked_fill", [1.0], [-1e9, 1.0], "float32"),
        sampled("to_copy", [1.0], [1.0]),
        replace(sampled("index_add", [1.0], [1.0]), place="train.py:3"),
    )
    refusal = Refusal("RuntimeError: no", exact.readings[:2], "train.py:3")
    diagnosis = examined(Suspect(refusal, exact, Setting("bfloat16", 1.0, prepare_finds_modules=True)))
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation) == ("error", "index_add")
    advised = [
        "amp = ampx.init(dtype='bfloat16', deny=['module:block'])  # may cure it: keep it in float32",
        "model = amp.prepare(model)  # which has that module, before wrap_optimizer",
    ]
    assert diagnosis.advice.splitlines() == advised
    calls = Suspect(refusal, exact, Setting("bfloat16", 1.0))  # which find the module
    assert examined(calls).advice.splitlines() == advised[:1]
    assert "  raises: the output of index_add in module 'block'" in str(diagnosis)


def test_an_epsilon_that_float32_needs_as_well_is_one_that_the_dtype_holds():
    """What is divided by an epsilon next to float32's smallest number overflows: 10 / 2e-38 is beyond float32."""
    zero = seen(read("div", [0.0, 1.0], [math.inf]), **FAILS)
    for dtype, smallest in (("float16", 2.0**-14), ("bfloat16", 1e-6)):
        advice = diagnosed(zero, zero, dtype).advice
        epsilon = float(advice.rpartition("+ ")[2].rstrip(")"))
        assert smallest <= epsilon < 1e-3


def test_a_product_is_not_called_a_sum():
    diagnosis = in_both("cumprod", [6.0] * 8, np.cumprod)
    assert diagnosis.kind == "sum"
    assert "overflows float16: it multiplies 8 elements of up to 6, and is 1.68e+06 in float32" in diagnosis.why
    mean, exact = (seen(read("mean", [3e4] * 8, [value]), loss=value) for value in (math.inf, 3e4))
    assert "it adds 8 elements of up to 3e+04, and is 3e+04 in float32" in find_fault(mean, exact, "float16", 1.0).why


def test_a_cast_of_a_mask_is_judged_by_what_it_is_given_and_not_by_another_cast_of_that_number():
    cast = read("convert_element_type", [float(np.finfo(np.float32).min)], [-math.inf])
    another = read("convert_element_type", [1.0], [1.0], dtype="float32")
    assert diagnosed(seen(cast, loss=math.nan), seen(another), "float16").kind == "mask"


def _value(module, values, received, operation=""):
    """A reading of some numbers, computed from others."""
    sample = np.array(values, np.float32)
    return Reading(module, "Part", operation, "forward", 0, "float16", describe(sample), describe(received), sample)


def test_the_way_to_a_place_goes_back_along_inputs_until_one_agrees_with_float32():
    """`beside` runs in between, is wrong, and is no input of the place; a cast is no link."""
    exact = [
        _value("batch", [1, 2, 4], []),
        _value("first", [10, 20, 40], [1, 2, 4]),
        _value("lossy", [11, 22, 44], [10, 20, 40]),
        _value("beside", [7, 8, 9], [1, 2, 4]),
        _value("head", [12, 24, 48], [11, 22, 44], "copy"),
        _value("head", [5, 6, 7], [12, 24, 48], "mm"),
    ]
    low = [
        *exact[:2],
        _value("lossy", [11, 22, 33], [10, 20, 40]),
        _value("beside", [7, 8, 1], [1, 2, 4]),
        _value("head", [12, 24, 36], [11, 22, 33], "copy"),
        _value("head", [5, 6, math.inf], [12, 24, 36], "mm"),
    ]
    links = chain(low, 5, {key_of(entry): entry for entry in exact}, "float16")
    assert [(link.place.module, link.place.operation) for link in links] == [
        ("first", ""),
        ("lossy", ""),
        ("head", "mm"),
    ]
    assert [link.error for link in links] == [0.0, pytest.approx(11 / math.hypot(11, 22, 44)), math.inf]
    assert [(link.place.value.largest, link.float32.largest) for link in links] == [(40, 40), (33, 44), (6, 7)]
    assert str(links[1]) == "module 'lossy': 11 to 33, in float32 11 to 44, off by 22 %"
    assert str(links[2]).endswith("not finite")


def test_what_cures_a_step_and_not_those_behind_it_is_no_cure():
    """The norm of a row of zeros in float32, say: its gradients fail in every later step."""
    broken = read("pow", [3e2], [math.inf], "norm")
    low = seen(read("mm", [1.0], [3e2], "linear"), broken, loss=math.inf)
    exact = seen(read("mm", [1.0], [3e2], "linear"), read("pow", [3e2], [9e4], "norm"))
    tried = []

    def again(change, modules):
        tried.append(change)
        return replace(exact, fails_later=change.dtype is None)

    diagnosis = examined(Suspect(low, exact, Setting("float16", 1.0), again))
    assert (tried[0].float32, tried[-1].dtype) == (("norm",), "bfloat16")
    assert str(diagnosis.experiments[0]).endswith("finite, 0 % from float32's, and the next steps fail")
    assert [entry.cures for entry in diagnosis.experiments] == [False] * (len(tried) - 1) + [True]
    assert diagnosis.advice == 'amp = ampx.init(dtype="bfloat16")'


@pytest.mark.parametrize(
    ("exact_gradient", "low_gradient", "kind", "words"),
    [
        ([4e-3, 2e-3], [0.0, 0.0], "digits", "loses precision: it is 100 %"),  # 1 - y * y of a y that is 1
        ([4e-9, 2e-9], [0.0, 0.0], "flush", "underflows: it is 100 %"),
        ([4e-3, 2e-3], [4e-3, 2.1e-3], None, ""),
    ],
)
def test_a_wrong_gradient_is_found_behind_a_forward_pass_that_is_right(exact_gradient, low_gradient, kind, words):
    def run(gradient, dtype):
        later = sampled("mul_backward", [1.0], [1.0, 1.0], dtype)
        tanh = sampled("tanh_backward", [1.0], gradient, dtype)
        backward = (replace(entry, direction="backward") for entry in (later, tanh))
        return seen(sampled("tanh", [4.0], [1.0], dtype), *backward)

    fault = gradient_fault(run(low_gradient, "float16"), run(exact_gradient, "float32"), "float16", 1.0)
    assert (fault and fault.kind) == kind
    if fault is not None:
        assert fault.place.operation == "tanh_backward"
        assert words in fault.why


@pytest.mark.parametrize(("carries", "words"), [(True, "loses precision"), (False, "underflows")])
def test_what_a_gradient_underflows_is_judged_with_the_loss_scale_only_where_it_carries_that(carries, words):
    """Of 64 numbers 1e-8 is zero in float16, and 1e-8 times 4096 is not; one number that is right says which it was."""

    def run(dtype, scale=1.0):
        gradient = round_to(np.array([1e-8] * 63 + [1e-2]) * scale, dtype)
        lost = gradient if dtype == "float32" else np.array([0.0] * 63 + [gradient[-1] * 0.5])
        return seen(replace(sampled("mul", [1.0], lost, dtype), direction="backward"))

    fault = gradient_fault(run("float16", 4096.0 if carries else 1.0), run("float32"), "float16", 4096.0)
    assert words in fault.why
    assert fault.kind == ("digits" if carries else "flush")


@pytest.mark.parametrize(
    ("operation", "terms", "is_wrong"), [("sum", 3e3, False), ("sum", 1e-3, True), ("view", 1e-3, False)]
)
def test_a_gradient_that_cancels_to_the_rounding_of_its_terms_or_is_only_moved_is_not_called_wrong(
    operation, terms, is_wrong
):
    """That of a bias in front of a softmax is zero but for rounding, in float32, too."""

    def run(gradient, dtype):
        bias = replace(sampled(operation, [terms, -terms, 0.0, 0.0], gradient, dtype), direction="backward")
        return seen(sampled("linear", [4.0], [1.0], dtype), bias)

    fault = gradient_fault(run([-2e-4, 1e-4], "float16"), run([2e-4, 1e-4], "float32"), "float16", 1.0)
    assert (fault is not None) == is_wrong


def added(total, term, result, dtype, call, operation="add", line="train.py:7"):
    return replace(read(operation, [total, term], [result], "", dtype=dtype, call=call), place=line)


@pytest.mark.parametrize(
    ("low", "position"),
    [
        ([added(508.0, 2.0, 510.0, "bfloat16", 0), added(510.0, 2.0, 512.0, "bfloat16", 1)], None),
        ([added(510.0, 2.0, 512.0, "bfloat16", 0), added(512.0, 1.5, 512.0, "bfloat16", 1)], 1),
        # Of these that which loses most is named, and no difference that nothing comes of.
        (
            [
                added(0, 0.5, 512.0, "bfloat16", 0),
                *(added(512.0, term, 512.0, "bfloat16", 1) for term in (0.5, 1.5, 1)),
            ],
            2,
        ),
        ([added(1.0, 1e-3, 1.0, "bfloat16", 0, "sub")], None),
    ],
)
def test_a_schedule_that_decides_otherwise_is_told_with_the_total_that_grows_no_more(low, position):
    low = [replace(entry, call=call) for call, entry in enumerate(low)]
    exact = [
        added(entry.inputs.largest, entry.inputs.smallest, 600.0 + at, "float32", at) for at, entry in enumerate(low)
    ]
    diagnosis = examined(Suspect(seen(*low), seen(*exact), Setting("bfloat16", 1.0), decides="the rate is 1"))
    assert diagnosis.kind == "digits"
    assert diagnosis.why.startswith("the rate is 1")
    assert diagnosis.first_nonfinite == (None if position is None else Place.of(low[position]))
    if position is not None:
        assert "(train.py:7) loses precision: 512 and 1.5 more are 512" in diagnosis.why


@pytest.mark.parametrize(
    ("largest", "cured", "kind"),
    [
        (1e5, True, "flush"),
        (1e5, False, "healthy"),  # which nothing shows to do harm
        (1.0, True, "healthy"),  # at a larger loss scale it may not be zero
    ],
)
def test_gradients_that_flush_at_the_largest_loss_scale_are_a_fault_if_a_change_cures_it(largest, cured, kind):
    def run(gradient, dtype):
        block = read("", [], gradient, direction="backward", dtype=dtype)
        large = read("", [], [largest], "large", "backward", dtype)
        return seen(read("", [1.0], [1.0], dtype=dtype), large, block, gradients=gradient)

    reference = run([1e-9] * 64, "float32")

    def again(change, modules):
        return reference if cured else run([0.0] * 64, "float16")

    diagnosis = examined(Suspect(run([0.0] * 64, "float16"), reference, Setting("float16", 1.0), again))
    assert (diagnosis.kind, diagnosis.deny) == (kind, ("module:block",) if kind == "flush" else ())


@pytest.mark.parametrize(("loss", "kind"), [(1.01, "digits"), (1.2, "healthy")])
def test_a_wrong_gradient_is_named_only_if_float32_there_brings_the_losses_together(loss, kind):
    """Of noise, too, a change makes less."""

    def run(gradient, dtype, loss):
        tanh = replace(sampled("tanh_backward", [1.0], gradient, dtype), direction="backward")
        return seen(sampled("tanh", [4.0], [1.0], dtype), tanh, loss=loss)

    reference, tried = run([4e-3], "float32", 1.0), []

    def again(change, modules):
        tried.append(change.float32)
        return run([4e-3], "float32", loss)

    batch = Suspect(run([0.0], "bfloat16", 1.0), reference, Setting("bfloat16", 1.0), again)
    diagnosis = examined(replace(batch, parts=True))
    assert tried[0] == ("block",)
    assert (diagnosis.kind, diagnosis.deny) == (kind, ("module:block",) if kind == "digits" else ())
    assert examined(batch).kind == "healthy"  # where the losses do not part
