"""What is computed in which dtype: names of dtypes, opt levels, and what a session really does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .errors import AmpxError, PolicyFileError, UnsupportedDtypeError, UnsupportedLevelError, shown
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
    """The dtypes of parameters, computation and the model's outputs.

    `Policy.parse` reads what `str(policy)` writes.

    Attributes:
        param_dtype: Dtype of the parameters.
        compute_dtype: Dtype that operations compute in.
        output_dtype: Dtype of the model's outputs.

    Example:
        >>> ampx.Policy.parse("mixed_float16").compute_dtype
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
    """What an opt level switches on."""

    name: OptLevel
    casts_ops: bool  # operations are cast by the framework's op lists while autocast is on
    casts_params: bool  # `prepare` turns parameters into the compute dtype
    master_weights: bool  # `prepare` gives the optimizer float32 copies to update
    scales_loss: bool  # the loss scale is dynamic by default (for float16; bfloat16 needs none)

    def policy(self, dtype: Dtype) -> Policy:
        """Return the dtypes of parameters, computation and outputs when `dtype` is the compute dtype."""
        if self.name == "O0":
            return Policy()
        return Policy(dtype if self.casts_params else "float32", dtype, "float32")


LEVELS: Final[dict[str, Level]] = {
    "O0": Level("O0", False, False, False, False),
    "O1": Level("O1", True, False, False, True),
    "O2": Level("O2", False, True, True, True),
    "O3": Level("O3", False, True, False, False),
}


def find_level(level: object) -> Level:
    """Look a level up by name."""
    entry = LEVELS.get(level) if isinstance(level, str) else None
    if entry is None:
        raise UnsupportedLevelError(
            f"level={level!r} is not an opt level; accepted: 'O0' (float32), 'O1' (casting by op lists), 'O2' "
            f"(low-precision parameters, float32 norms and master weights), 'O3' (all low precision). "
            f"Pass one of these; 'O1' suits most training."
        )
    return entry


POLICY_SCHEMA: Final = "ampx.policy/1"
# An entry of a list, and the comment behind it: those of `ampx tune` begin with a word of its own.
_COMMENTED: Final = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*,?[ \t]*#[ \t]*(.*)""")
_MEASURED: Final = "tune: "
_KEYS: Final = ("schema", "framework", "dtype", "level", "loss_scale", "allow", "deny", "enabled")


@dataclass(frozen=True)
class PolicyFile:
    """The content of a policy file: measured arguments of `init`.

    Attributes:
        framework: Whose script it was measured on; None for any.
        dtype: As in `init`.
        level: As in `init`.
        loss_scale: As in `init`: `"auto"`, `"dynamic"` or a positive number.
        allow: As in `init`; names only.
        deny: As in `init`; names only.
        reasons: By entry of `allow` and `deny`, or by key, why; comments of the file.
        source: The file, for messages.
        enabled: As in `init`.
    """

    framework: str | None = None
    dtype: str = "auto"
    level: OptLevel = "O1"
    loss_scale: str | float = "auto"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    source: str = "ampx.toml"
    enabled: bool = True

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PolicyFile:
        """Read a file.

        Raises:
            PolicyFileError: There is none, it is no TOML, or it holds what no policy has.
        """
        source = os.fspath(path)
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise PolicyFileError(
                f"the policy file {source!r} cannot be read: {error.strerror}; accepted: a file that `ampx tune` "
                f"wrote. Check the path."
            ) from error
        return cls._of(_parsed(data, source).unwrap(), source)

    @classmethod
    def _of(cls, values: Mapping[str, Any], source: str) -> PolicyFile:
        def check(holds: bool, key: str, accepted: str) -> None:
            if not holds:
                raise PolicyFileError(
                    f"the policy file {source!r} has {key} = {shown(values.get(key))}; accepted: {accepted}. Correct "
                    f"it, or write the file anew by `ampx tune`."
                )

        unknown = sorted(values.keys() - set(_KEYS))
        if unknown:
            raise PolicyFileError(
                f"the policy file {source!r} has {', '.join(unknown)}, which no policy has; accepted: "
                f"{', '.join(_KEYS)}. Remove or correct it."
            )
        check(values.get("schema", POLICY_SCHEMA) == POLICY_SCHEMA, "schema", repr(POLICY_SCHEMA))
        for key in ("framework", "dtype", "level"):
            check(isinstance(values.get(key, ""), str), key, "text")
        for key in ("allow", "deny"):
            entries = values.get(key, [])
            names = isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)
            check(names, key, "a list of names, such as ['module:head']")
        enabled = values.get("enabled", True)
        check(isinstance(enabled, bool), "enabled", "true or false")
        scale = values.get("loss_scale", "auto")
        try:
            dtype = values.get("dtype", "auto")
            dtype = dtype if dtype == "auto" else normalise_dtype(dtype)
            level = find_level(values.get("level", "O1")).name
            if scale != "auto":
                LossScale.parse(scale)
        except AmpxError as error:
            raise PolicyFileError(f"the policy file {source!r} cannot be honoured: {error}") from error
        allow, deny = (tuple(values.get(key, ())) for key in ("allow", "deny"))
        return cls(values.get("framework"), dtype, level, scale, allow, deny, source=source, enabled=enabled)

    def check_framework(self, framework: str) -> None:
        """Raise where the file is of another framework.

        Raises:
            PolicyFileError: It is.
        """
        if self.framework is not None and self.framework != framework:
            raise PolicyFileError(
                f"the policy file {self.source!r} is for {self.framework!r}, and {framework!r} is what computes; "
                f"accepted: a file of the same framework. Write one by `ampx tune`."
            )

    def combined(
        self, dtype: object, level: OptLevel, loss_scale: object, allow: Iterable[Any], deny: Iterable[Any]
    ) -> tuple[Any, OptLevel, Any, Iterable[Any], Iterable[Any]]:
        """Return these arguments of `init`, with the file's where they have their defaults, and the lists joined."""
        return (
            self.dtype if isinstance(dtype, str) and dtype == "auto" else dtype,
            self.level if level == "O1" else level,
            self.loss_scale if isinstance(loss_scale, str) and loss_scale == "auto" else loss_scale,
            _joined(self.allow, allow),
            _joined(self.deny, deny),
        )

    def text(self, before: bytes = b"", source: str = "ampx.toml") -> str:
        """Return the file, with the reasons as comments.

        Of a file that was there `before`, the comments and the entries of `allow` and `deny` that a person wrote stay.

        Raises:
            PolicyFileError: That file, which is called `source`, is no TOML.
        """
        import tomlkit

        document = _parsed(before, source)
        scale = self.loss_scale if isinstance(self.loss_scale, str) else float(self.loss_scale)
        values = {"dtype": self.dtype, "level": self.level, "loss_scale": scale, "enabled": self.enabled}
        if self.framework is not None:
            values = {"framework": self.framework, **values}
        if self.enabled:
            del values["enabled"]
            document.pop("enabled", None)
        for key, value in {"schema": POLICY_SCHEMA, **values}.items():
            document[key] = item = tomlkit.item(value)
            reason = self._reason(key)
            item.trivia.comment_ws, item.trivia.comment = ("  ", f"# {reason}") if reason else ("", "")
        for key, entries in (("deny", self.deny), ("allow", self.allow)):
            document[key] = self._array(entries, document.get(key))
        return str(tomlkit.dumps(document))

    def _array(self, entries: Sequence[str], before: Any) -> Any:
        """Return a list, an entry a line; what a person added to the list before comes first."""
        import tomlkit

        array = tomlkit.array()
        comments = {} if before is None else dict(_COMMENTED.findall(before.as_string()))
        for entry in before or ():
            comment = comments.get(entry.as_string(), "")
            if not comment.startswith(_MEASURED) and entry not in entries:
                array.add_line(entry, comment=comment or None)
        for entry in entries:
            reason = self._reason(entry)
            array.add_line(entry, comment=(reason and _MEASURED + reason) or None)
        array.add_line(indent="")
        return array

    def _reason(self, name: str) -> str:
        return " ".join(self.reasons.get(name, "").split())


def _parsed(data: bytes, source: str) -> Any:
    """Return a file as a document of TOML, which keeps comments."""
    import tomlkit

    try:
        return tomlkit.parse(data)
    except ValueError as error:
        raise PolicyFileError(
            f"the policy file {source!r} is no TOML: {error}; accepted: a file that `ampx tune` wrote. Mend that line."
        ) from error


def _joined(entries: Sequence[str], more: Iterable[Any]) -> Iterable[Any]:
    if isinstance(more, str) or not isinstance(more, Iterable):  # `init` says that it is no list
        return more
    return [*entries, *(entry for entry in more if not isinstance(entry, str) or entry not in entries)]


@dataclass(frozen=True)
class Effective:
    """What a session really does, and why.

    Attributes:
        framework: Name of the framework.
        device: Name of the device on which computation is cast.
        dtype: Compute dtype; None where mixed precision is off.
        level: Opt level.
        policy: Dtypes of parameters, computation and outputs.
        loss_scale: Default configuration for wrapped optimizers.
        native: Whether the device computes the dtype in hardware.
        process_wide: Whether casting is on outside `autocast` regions, too.
        enabled: Whether calls do anything.
        reason: Why, in one sentence.

    Example:
        >>> print(amp.effective.dtype, amp.effective.reason)
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
