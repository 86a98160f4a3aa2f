"""What `ampx.convert` needs of a framework: the contract `Converter`, and what it hands over."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ampx.backend import Array, Contract
from ampx.policy import Dtype


@dataclass(frozen=True)
class Conversion:
    """How `Converter.convert` converts a model.

    Attributes:
        dtype: Of weights and computation; `"float32"` asks for a copy that computes what the model does.
        deny: What stays in float32: `"module:pattern"` for names of modules (`fnmatch`), and what else the backend
            takes.
        keep_io: Floating outputs are float32, and inputs may be; False: floating outputs are of `dtype`.
        batch: What the model is called with, for backends that trace it; None where no batch is at hand.
    """

    dtype: Dtype
    deny: tuple[Any, ...] = ()
    keep_io: bool = True
    batch: Any = None


class Converted(NamedTuple):
    """What `Converter.convert` returns.

    Attributes:
        model: The converted model.
        modules: Names of the modules that `deny` could keep in float32 and did not, those without others inside first.
    """

    model: Any
    modules: tuple[str, ...]


class Converter(Contract):
    """Conversion of trained models for inference."""

    name: ClassVar[str] = "converter"
    feature: ClassVar[str] = "converting models for inference (ampx.convert)"

    @abc.abstractmethod
    def convert(self, model: Any, conversion: Conversion) -> Converted:
        """Return a copy of a trained float32 model for inference in low precision; the model stays as it is.

        The copy is in inference mode and shares no memory with the model that either would write to. Normalization and
        what is denied keep float32 weights and compute in float32; running statistics stay float32, integers as they
        are, and tied weights tied.

        Args:
            model: The model; a function and its parameters where these are a value (JAX).
            conversion: How.

        Raises:
            InvalidOptionError: It is no model that this backend converts, or needs a batch and got none.
            UnsupportedDtypeError: The device of the model does not compute the dtype.
            UnsupportedOpError: An entry of `deny` matches nothing.
            ConversionError: The framework cannot convert it.
        """

    @abc.abstractmethod
    def infer(self, model: Any, batch: Any) -> Mapping[str, Array]:
        """Call a converted model, and return its outputs by their places in what it returns, as NumPy arrays.

        Floating outputs are float32. Nothing is differentiated.

        Args:
            model: What `convert` returned.
            batch: A tuple holds positional arguments, a dict named ones; all else is the only argument.

        Sync: one.
        """
