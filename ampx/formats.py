"""Floating dtypes: what they can hold; and which elements are a sample of a tensor."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

from .errors import UnsupportedDtypeError
from .policy import normalise_dtype


@dataclass(frozen=True)
class Format:
    """A floating dtype: what it can hold.

    Attributes:
        largest: Largest finite magnitude.
        smallest_normal: Smallest positive number with full precision.
        smallest: Smallest positive number.
        bits: Bits of the significand, the hidden one included; two numbers that are rounded differ by up to
            `2**-bits` of their magnitude.
        infinite: It has infinities; without them what is too large becomes NaN.
    """

    largest: float
    smallest_normal: float
    smallest: float
    bits: int
    infinite: bool = True

    @property
    def flushes_to(self) -> float:
        """Largest magnitude that rounds to zero (round to nearest even)."""
        return self.smallest / 2

    @property
    def halfway(self) -> float:
        """Magnitude half-way between the largest number and what would come next.

        It rounds to even: away from a significand of ones, but not from that of a dtype without infinities.
        """
        return self.largest + 2.0 ** (math.frexp(self.largest)[1] - self.bits - 1)

    @property
    def overflows_from(self) -> float:
        """Smallest magnitude, of those that float32 holds, that rounds to infinity, or to NaN where there is none."""
        ulp = 2.0 ** (math.frexp(self.largest)[1] - FORMATS["float32"].bits)
        return self.halfway if self.infinite else self.halfway + ulp


# IEEE 754 binary16 and binary32; bfloat16; OCP 8-bit floating point 1.0 (2023), table 1.
FORMATS: Final[dict[str, Format]] = {
    "float32": Format((2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149, 24),
    "bfloat16": Format((2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, 8),
    "float16": Format(65504.0, 2.0**-14, 2.0**-24, 11),
    "float8_e5m2": Format(57344.0, 2.0**-14, 2.0**-16, 3),
    "float8_e4m3": Format(448.0, 2.0**-6, 2.0**-9, 4, infinite=False),
}
_DIGITS: Final = "~"
# As frameworks call those that are no dtypes of `ampx.init`.
_ALIASES: Final = {"float8_e4m3fn": "float8_e4m3", "e4m3": "float8_e4m3", "e5m2": "float8_e5m2"}


def digits_of(bits: int) -> str:
    """Return the name by which `Probe.force` rounds to so many bits of a significand, in the range of float32."""
    return f"{bits}{_DIGITS}"


def find_digits(name: str) -> int | None:
    """Return the bits of the significand that `digits_of` names; None for the name of a dtype."""
    bits = name.removesuffix(_DIGITS)
    return None if bits == name else int(bits)


def to_digits(values: Any, bits: int) -> Any:
    """Return float32 numbers rounded to nearest with so many bits, by Dekker's splitting.

    What is not finite, or becomes so on the way because it is huge, is NaN: put the number itself in its place.
    """
    large = values * (2.0 ** (FORMATS["float32"].bits - bits) + 1)
    return large - (large - values)


def find_format(dtype: object) -> str:
    """Return the name in `FORMATS` of a dtype that can be simulated, by any usual name of it.

    Raises:
        UnsupportedDtypeError: There is none.
    """
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2].strip().lower().replace("fp8_", "float8_")
    name = _ALIASES.get(name, name)
    if name in FORMATS:
        return name
    try:
        return normalise_dtype(dtype)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(
            f"{dtype!r} is no dtype whose rounding is known; accepted: {', '.join(FORMATS)}, and usual names of these, "
            f"such as fp16. Pass one of these."
        ) from error


def spelled(name: str) -> str:
    """Return the one spelling of a dtype that an option of a command names; `"auto"` as it is.

    Raises:
        UnsupportedDtypeError: Nothing trains in it.
    """
    try:
        return "auto" if name == "auto" else normalise_dtype(name)
    except UnsupportedDtypeError as error:
        try:
            simulated = f" What {name} would do is simulated by `ampx tune --what-if {find_format(name)}`."
        except UnsupportedDtypeError:
            simulated = ""
        raise UnsupportedDtypeError(f"--dtype: {error}{simulated}") from error


def stride(elements: int, samples: int, *sizes: int) -> int:
    """Return the distance between the elements of a sample.

    It has no factor of the number of elements, so none of any dimension: a sample is drawn across rows and columns.

    Args:
        elements: Of one tensor, or of several that are sampled as one.
        samples: At most so many elements are in the sample.
        sizes: Elements of each of several.
    """
    distance, common = max(1, -(-elements // samples)), math.lcm(*filter(None, sizes or (elements,)))
    return next(step for step in itertools.count(distance) if math.gcd(step, common) == 1)
