"""What is computed in which dtype: names of dtypes, opt levels, and what a session really does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from .errors import UnsupportedDtypeError, UnsupportedLevelError
from .scale_state import LossScale

Dtype = Literal["float16", "bfloat16", "float32"]

_ALIASES: Final[dict[str, Dtype]] = {
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "f32": "float32",
}
_PRESETS: Final[dict[str, tuple[Dtype, Dtype, Dtype]]] = {
    "mixed_float16": ("float32", "float16", "float32"),
    "16-mixed": ("float32", "float16", "float32"),
    "mixed_bfloat16": ("float32", "bfloat16", "float32"),
    "bf16-mixed": ("float32", "bfloat16", "float32"),
    "16-true": ("float16", "float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16"),
    "32-true": ("float32", "float32", "float32"),
}


def normalise_dtype(dtype: object) -> Dtype:
    """Return the one spelling of a dtype that ampx uses.

    Args:
        dtype: `"float16"`, `"bfloat16"`, `"float32"`, a usual alias (`"fp16"`, `"half"`, `"bf16"`,
            `"fp32"`), or a framework's dtype object whose name ends in one of these (`torch.float16`,
            `jnp.bfloat16`, `tf.float16`).

    Raises:
        UnsupportedDtypeError: It is none of these.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    normal = _ALIASES.get(str(name).rsplit(".", 1)[-1].strip().lower())
    if normal is None:
        raise UnsupportedDtypeError(
            f"dtype={dtype!r} is not a dtype of mixed precision; accepted: 'float16', 'bfloat16', 'float32' "
            f"(also 'fp16', 'half', 'bf16', 'fp32'), or 'auto' where a choice is offered. Pass one of these."
        )
    return normal


@dataclass(frozen=True)
class Policy:
    """Which dtype the parameters, the computation and the model's outputs have.

    `str(policy)` and `Policy.parse` are inverse to each other.
    """

    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    output_dtype: Dtype = "float32"

    def __str__(self) -> str:
        """Spell the policy so that `Policy.parse` reads it back."""
        return f"param={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy.

        Args:
            text: `"param=float32,compute=float16,output=float32"`, any dtype alias in it, `p=`, `c=`, `o=`
                for short, or a preset: `mixed_float16`, `mixed_bfloat16`, `16-mixed`, `bf16-mixed`,
                `16-true`, `bf16-true`, `32-true`.

        Raises:
            UnsupportedDtypeError: The text is none of these.
        """
        preset = _PRESETS.get(text.strip().lower())
        if preset is not None:
            return cls(*preset)
        fields: dict[str, Dtype] = {}
        for part in text.split(","):
            key, separator, value = part.partition("=")
            name = {"p": "param", "c": "compute", "o": "output"}.get(key.strip(), key.strip())
            if not separator or name not in ("param", "compute", "output") or f"{name}_dtype" in fields:
                raise UnsupportedDtypeError(
                    f"policy {text!r} cannot be read at {part!r}; accepted: 'param=…,compute=…,output=…' or one "
                    f"of {', '.join(_PRESETS)}. Pass one of these."
                )
            fields[f"{name}_dtype"] = normalise_dtype(value)
        return cls(**fields)


OptLevel = Literal["O0", "O1", "O2", "O3"]


@dataclass(frozen=True)
class Level:
    """What an opt level switches on.

    Attributes:
        name: The level's name.
        casts_ops: Operations are cast by the framework's op lists while autocast is on.
        casts_params: `prepare` turns parameters into the compute dtype.
        keeps_norms: `prepare` leaves normalization layers in float32.
        master_weights: `prepare` gives the optimizer float32 copies to update.
        scales_loss: The loss scale is dynamic by default (for float16; bfloat16 needs none).
    """

    name: OptLevel
    casts_ops: bool
    casts_params: bool
    keeps_norms: bool
    master_weights: bool
    scales_loss: bool

    def policy(self, dtype: Dtype) -> Policy:
        """Return the dtypes of parameters, computation and outputs when `dtype` is the compute dtype."""
        if self.name == "O0":
            return Policy()
        return Policy(dtype if self.casts_params else "float32", dtype, "float32")


LEVELS: Final[dict[str, Level]] = {
    "O0": Level("O0", False, False, True, False, False),
    "O1": Level("O1", True, False, True, False, True),
    "O2": Level("O2", False, True, True, True, True),
    "O3": Level("O3", False, True, False, False, False),
}


def find_level(level: object) -> Level:
    """Look a level up by name.

    Raises:
        UnsupportedLevelError: There is no such level.
    """
    entry = LEVELS.get(level) if isinstance(level, str) else None
    if entry is None:
        raise UnsupportedLevelError(
            f"level={level!r} is not an opt level; accepted: 'O0' (float32), 'O1' (casting by op lists), 'O2' "
            f"(low-precision parameters, float32 norms and master weights), 'O3' (all low precision). "
            f"Pass one of these; 'O1' suits most training."
        )
    return entry


@dataclass(frozen=True)
class Effective:
    """What a session really does, and why.

    Attributes:
        framework: Name of the framework.
        device: Name of the device whose computation is cast.
        dtype: Compute dtype; None where mixed precision is off.
        level: Opt level.
        policy: Dtypes of parameters, computation and outputs.
        loss_scale: Default configuration for wrapped optimizers.
        native: The device computes the dtype in hardware.
        process_wide: Casting is on outside `autocast` regions too.
        enabled: False: every call is transparent.
        reason: Why, in one sentence.
    """

    framework: str
    device: str
    dtype: Dtype | None
    level: str
    policy: Policy
    loss_scale: LossScale
    native: bool
    process_wide: bool
    enabled: bool
    reason: str
