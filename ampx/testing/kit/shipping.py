"""`ampx.convert`: the verbs `convert` and `infer`, and that a conversion which does not agree is refused.

The model is a row of layers that multiply by one weight each, as for the precision debugger. A weight that the low
dtype rounds to one tells in which dtype it is stored, and so what a conversion must return.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import pytest

import ampx
from ampx.backend import offer
from ampx.formats import FORMATS
from ampx.policy import Dtype
from ampx.shipping.converter import Conversion, Converter
from ampx.testing.base import KitTests, requires
from ampx.testing.checks import refused

INPUTS: Final = (1.0, 2.0, -4.0, 0.5)
LOOSE: Final = 0.1


class ConvertTests(KitTests):
    """`ampx.convert`."""

    @property
    def dtype(self) -> Dtype:
        """The low dtype."""
        return self.subject.converts_to or self.subject.dtype

    def near(self) -> float:
        """Return a number that float32 holds and the low dtype rounds to 1."""
        return 1 + 2.0 ** -(FORMATS[self.dtype].bits + 1)

    def converted(self, model: Any, *inputs: Sequence[float], **options: Any) -> Any:
        """Convert to the dtype of the harness, with loose bounds unless told otherwise."""
        batches = [self.subject.batch(values) for values in inputs or (INPUTS,)]
        options = {"tolerance": LOOSE, "framework": self.subject.framework, **options}
        return ampx.convert(model, self.dtype, batches=batches, **options)

    def outputs(self, model: Any, inputs: Sequence[float] = INPUTS) -> list[float]:
        """Return the numbers that a converted model returns."""
        (values,) = offer(self.backend, Converter).infer(model, self.subject.batch(inputs)).values()
        return [float(value) for value in values.flatten()]

    @requires("converter")
    def test_weights_are_stored_and_used_in_the_low_dtype(self) -> None:
        """The digit that the dtype cannot hold is gone, and the weights are smaller."""
        model, names = self.subject.shipped((self.near(), 2.0))
        assert self.subject.stored(model, names[0]) == {"float32"}
        low = self.converted(model)
        assert self.outputs(low) == [2 * value for value in INPUTS]
        assert [self.subject.stored(low, name) for name in names] == [{self.dtype}] * 2

    @requires("converter")
    def test_outputs_are_float32_unless_asked(self) -> None:
        """At the border; inside, numbers are low."""
        model, _ = self.subject.shipped((2.0, 4.0))
        if not self.subject.returns_low:
            with refused(ampx.InvalidOptionError, passed="keep_io=False", accepted="keep_io=True", advice="Pass"):
                self.converted(model, keep_io=False)
        for keep, dtype in ((True, "float32"), (False, self.dtype))[: 1 + self.subject.returns_low]:
            output = self.subject.called(self.converted(model, keep_io=keep), self.subject.batch(INPUTS))
            assert self.subject.dtype_of(output) == dtype
            assert self.subject.numbers(output) == [8 * value for value in INPUTS]

    @requires("converter")
    def test_what_is_denied_stays_in_float32(self) -> None:
        """Its weight, what it computes, and what it returns."""
        near = self.near()
        model, names = self.subject.shipped((2.0, near))
        low = self.converted(model, deny=[f"module:{names[1]}"])
        assert self.outputs(low) == [2 * near * value for value in INPUTS]
        assert [self.subject.stored(low, name) for name in names] == [{self.dtype}, {"float32"}]

    @requires("converter")
    def test_normalization_stays_in_float32_and_uses_its_running_statistics(self) -> None:
        """The model is in training, where it would use those of the batch; these are mean 0 and variance 1."""
        model, names = self.subject.shipped((2.0, 4.0), norm=True)
        before = self.subject.model_state(model)
        low = self.converted(model)
        assert self.outputs(low) == pytest.approx(
            [8 * value for value in INPUTS], rel=4 * 2.0 ** -FORMATS[self.dtype].bits
        )
        assert [self.subject.stored(low, name) for name in names] == [*[{self.dtype}] * 2, {"float32"}]
        assert self.subject.model_state(model) == before

    @requires("converter")
    def test_the_model_stays_as_it_is(self) -> None:
        """Where it is converted, and where that is refused."""
        model, names = self.subject.shipped((self.near(), 2.0))
        before = self.subject.model_state(model)
        assert self.converted(model) is not model
        with pytest.raises(ampx.ConversionError):
            self.converted(model, tolerance=1e-9)
        assert self.subject.model_state(model) == before
        assert self.subject.stored(model, names[0]) == {"float32"}

    @requires("converter")
    def test_outputs_that_do_not_agree_are_refused_with_the_layer_that_needs_float32(self) -> None:
        """The message names the batch, and the layer; denied, the model is converted."""
        model, names = self.subject.shipped((1.0, 2.0, self.near()))
        entry = f"module:{names[2]}"
        with refused(ampx.ConversionError, passed="batch 1", accepted="up to 1e-06", advice=f"deny=[{entry!r}]"):
            self.converted(model, (0.0,) * len(INPUTS), INPUTS, tolerance=1e-6)
        low = self.converted(model, INPUTS, tolerance=1e-6, deny=[entry])
        assert self.outputs(low) == [2 * self.near() * value for value in INPUTS]

    @requires("converter")
    def test_a_session_changes_nothing_of_a_conversion(self) -> None:
        """Where casting is on for the whole process, too."""
        model, names = self.subject.shipped((self.near(), 2.0))
        self.start()
        low = self.converted(model)
        ampx.shutdown()
        assert self.outputs(low) == [2 * value for value in INPUTS]
        assert [self.subject.stored(low, name) for name in names] == [{self.dtype}] * 2

    @requires("converter")
    def test_a_weight_that_becomes_infinite_is_refused(self) -> None:
        """By the comparison, or before it; only float16 has a limit that float32 passes."""
        if self.dtype != "float16":
            pytest.skip(f"{self.dtype} has the exponents of float32: no weight becomes infinite")
        model, _ = self.subject.shipped((2.0**17, 1.0))
        with pytest.raises(ampx.ConversionError, match=r"infinite|not finite"):
            self.converted(model, tolerance=math.inf)

    @requires("converter")
    def test_mistakes_are_refused(self) -> None:
        """Before anything is converted."""
        model, _ = self.subject.shipped((1.0, 2.0))
        for options, error, passed in (
            ({"deny": ["module:nowhere"]}, ampx.UnsupportedOpError, "'module:nowhere'"),
            ({"tolerance": 0.0}, ampx.InvalidOptionError, "tolerance=0.0"),
            ({"keep_io": "yes"}, ampx.InvalidOptionError, "keep_io='yes'"),
        ):
            with refused(error, passed=passed, accepted="accepted: ", advice=""):
                self.converted(model, **options)
        with refused(ampx.UnsupportedDtypeError, passed="dtype='float32'", accepted="'float16'", advice="Pass"):
            ampx.convert(model, "float32", framework=self.subject.framework)

    @requires("converter")
    def test_a_conversion_without_a_batch_says_that_nothing_was_compared(self) -> None:
        """Or is refused, where the backend has to trace the model."""
        model, _ = self.subject.shipped((self.near(), 2.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ampx.PrecisionWarning)
            with pytest.raises((ampx.PrecisionWarning, ampx.InvalidOptionError), match="batch"):
                ampx.convert(model, self.dtype, framework=self.subject.framework)

    @requires("converter")
    def test_a_float32_copy_computes_what_the_model_does(self) -> None:
        """It is what conversions are held against."""
        model, _ = self.subject.shipped((self.near(), 2.0))
        batch = self.subject.batch(INPUTS)
        copied = offer(self.backend, Converter).convert(model, Conversion("float32", batch=batch)).model
        assert self.outputs(copied) == [2 * self.near() * value for value in INPUTS]
