"""The old names: `import apex` finds this package, and `uninstall` puts everything back."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from ampx.callers import is_search
from ampx.errors import AmpxError

_OURS: Final = "ampx_apex.apex"
PARTS: Final = (
    *("amp", "contrib", "fp16_utils", "fused_dense", "mlp", "multi_tensor_apply", "normalization", "optimizers"),
    "parallel",
)
_COMPILED: Final = ("amp_C", "apex_C")
# Old names that are not those of a module here, each with the module or the object in one that it means.
_OTHER_NAMES: Final = {
    "amp_C": "amp_c",
    "apex_C": "apex_c",
    "apex._autocast_utils": "amp.utils",
    "apex.amp.__version__": "amp.utils",
    "apex.amp.compat": "amp.utils",
    "apex.amp.lists.functional_overrides": "amp.lists:functional_overrides",
    "apex.amp.lists.tensor_overrides": "amp.lists:tensor_overrides",
    "apex.amp.lists.torch_overrides": "amp.lists:torch_overrides",
    "apex.amp.rnn_compat": "amp.utils",
    "apex.contrib.clip_grad": "contrib",
    "apex.contrib.clip_grad.clip_grad": "contrib",
    "apex.contrib.layer_norm": "contrib",
    "apex.contrib.layer_norm.layer_norm": "contrib",
    "apex.contrib.optimizers": "optimizers",
    "apex.contrib.optimizers.fp16_optimizer": "optimizers.fp16_optimizer",
    "apex.contrib.optimizers.fused_adam": "optimizers.fused_adam",
    "apex.contrib.optimizers.fused_lamb": "optimizers.fused_lamb",
    "apex.contrib.optimizers.fused_sgd": "optimizers.fused_sgd",
    "apex.contrib.xentropy": "contrib",
    "apex.contrib.xentropy.softmax_xentropy": "contrib",
    "apex.fused_dense.fused_dense": "fused_dense",
    "apex.mlp.mlp": "mlp",
    "apex.optimizers.fused_mixed_precision_lamb": "optimizers.fused_lamb",
    "apex.parallel.LARC": "parallel.larc",
    "apex.parallel.optimized_sync_batchnorm": "parallel.sync_batchnorm",
}
# What to use in place of parts of apex that are not provided, by the beginning of their names.
_ADVICE: Final = {
    "apex.RNN": "Use torch.nn.LSTM, GRU or RNN.",
    "apex.amp.": "Use the functions of apex.amp: initialize, scale_loss, register_half_function and their like.",
    "apex.contrib.bottleneck": "Use torch.nn.Conv2d and BatchNorm2d.",
    "apex.contrib.conv_bias_relu": "Use torch.nn.Conv2d and ReLU, which torch.compile fuses.",
    "apex.contrib.cudnn_gbn": "Use apex.parallel.SyncBatchNorm.",
    "apex.contrib.fmha": "Use torch.nn.functional.scaled_dot_product_attention.",
    "apex.contrib.focal_loss": "Use torchvision.ops.sigmoid_focal_loss.",
    "apex.contrib.group_norm": "Use torch.nn.GroupNorm.",
    "apex.contrib.groupbn": "Use apex.parallel.SyncBatchNorm.",
    "apex.contrib.index_mul_2d": "Index and multiply; torch.compile fuses both.",
    "apex.contrib.multihead_attn": "Use torch.nn.MultiheadAttention.",
    "apex.contrib.optimizers.distributed": "Use torch.distributed.optim.ZeroRedundancyOptimizer around an optimizer.",
    "apex.contrib.sparsity": "Use torch.sparse.to_sparse_semi_structured and torch.nn.utils.prune.",
    "apex.contrib.transducer": "Use torchaudio.functional.rnnt_loss.",
    "apex.pyprof": "Use torch.profiler.",
    "apex.reparameterization": "Use torch.nn.utils.parametrizations.weight_norm.",
    "apex.transformer": "Use megatron.core, or torch.distributed.tensor.parallel.",
}


class ApexPresentError(AmpxError, ImportError):
    """An apex is installed here that `install` must not replace unasked, or that cannot be completed."""


class ApexPartMissingError(AmpxError, ModuleNotFoundError):
    """The script imports a part of apex that ampx does not provide."""


class _LastFinder(importlib.abc.MetaPathFinder):
    """Says what is not provided, after all others found nothing, and that a distribution "apex" is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        old = fullname.replace(_OURS, "apex", 1)  # `from apex import part` asks for the part by our own name
        # A search for a part gets an answer. A part of ours may be hidden for now.
        if not old.startswith("apex.") or old.removeprefix("apex.") in PARTS or is_search():
            return None
        advice = next((text for name, text in _ADVICE.items() if old.startswith(name)), "")
        # Without `name`: Python would put a message of its own in place of this where a script writes
        # `from apex import part`.
        raise ApexPartMissingError(
            f"{old} was imported, which ampx does not provide; provided: apex.{', apex.'.join(PARTS)}. "
            f"{advice or 'Leave it out, or install NVIDIA apex.'}"
        )

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "apex"):
            yield _Apex()


class _Apex(importlib.metadata.Distribution):
    """The metadata of the last version of apex that had amp, by which libraries decide whether it is there."""

    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


# What undoes `install`, and whether a real apex stayed and was completed.
_installations: list[tuple[ExitStack, bool]] = []


def install(force: bool = False) -> None:
    """Make `import apex`, `from apex import amp` and `import amp_C` find this package, in this process.

    Where apex is not installed, all of it is supplied. Of an installed apex without `apex.amp`, as it is since
    2025, everything stays that it has; `amp` and the other parts it misses are supplied. An installed apex that
    has `apex.amp` is left alone, and so it is an error to ask. Calling it again changes nothing.

    Args:
        force: Replace an installed apex, whatever it has, and its compiled modules `amp_C` and `apex_C`.

    Raises:
        ApexPresentError: An installed apex has `apex.amp`, or misses it and cannot be imported; and not `force`.
    """
    if _installations:
        if not (force and _installations[0][1]):
            return
        uninstall()
    spec = None if force else _find_installed()
    if spec is None:
        _installations.append((_take_over(), False))
        return
    folders = list(spec.submodule_search_locations or [])
    if PathFinder.find_spec("apex.amp", folders) is not None:
        raise ApexPresentError(
            f"install() found an apex that has amp, at {spec.origin}; accepted: an environment without apex, or with "
            f"one that lacks apex.amp. Use that apex as it is, or pass force=True to replace it in this process."
        )
    _installations.append((_complete(spec, folders), True))


def uninstall() -> None:
    """Undo `install`: the old names mean what they meant before. Without `install` it does nothing."""
    while _installations:
        _installations.pop()[0].close()


def installed() -> bool:
    """Return whether the old names are installed."""
    return bool(_installations)


def _find_installed() -> ModuleSpec | None:
    """Find a real apex without importing it."""
    if "apex" in sys.modules:
        return sys.modules["apex"].__spec__
    return importlib.util.find_spec("apex")


def _take_over() -> ExitStack:
    modules, undo = _load("apex", set(_COMPILED)), ExitStack()
    old = [name for name in sys.modules if name in _COMPILED or f"{name}.".startswith("apex.")]
    undo.callback(sys.modules.update, {name: sys.modules.pop(name) for name in old})
    _put_in(modules, undo)
    return undo


def _complete(spec: ModuleSpec, folders: list[str]) -> ExitStack:
    """Complete a real apex with the parts it misses."""
    missing = [part for part in PARTS if PathFinder.find_spec(f"apex.{part}", folders) is None]
    compiled = {name for name in _COMPILED if importlib.util.find_spec(name) is None}
    modules: dict[str, ModuleType] = {}
    for part in missing:
        modules.update(_load(f"apex.{part}", compiled))
    try:
        real = importlib.import_module("apex")
    except Exception as error:
        raise ApexPresentError(
            f"install() found an apex without amp, at {spec.origin}, that fails to import: {error}; accepted: an apex "
            f"that imports, or none. Repair or remove it, or pass force=True to replace it in this process."
        ) from error
    undo = ExitStack()
    for part in missing:
        if part not in vars(real):
            _set(real, part, modules[f"apex.{part}"], undo)
    _put_in({name: module for name, module in modules.items() if name not in sys.modules}, undo)
    return undo


def _put_in(modules: dict[str, ModuleType], undo: ExitStack) -> None:
    """Put modules in by their old names, and on those that these names say they are in, as an import does."""
    finder = _LastFinder()

    def take_out() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    undo.callback(take_out)
    for name, module in modules.items():
        undo.callback(sys.modules.pop, name, None)
        parent, _, attribute = name.rpartition(".")
        if parent in modules and not hasattr(modules[parent], attribute):
            _set(modules[parent], attribute, module, undo)
    sys.modules.update(modules)
    sys.meta_path.append(finder)


def _set(module: ModuleType, name: str, value: ModuleType, undo: ExitStack) -> None:
    setattr(module, name, value)
    undo.callback(delattr, module, name)


def _load(old: str, compiled: set[str]) -> dict[str, ModuleType]:
    """Import our modules that stand for an old name and all below it; gives them by their old names."""
    name = old.replace("apex", _OURS, 1)
    module = importlib.import_module(name)
    modules = {old: module}
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        modules[info.name.replace(_OURS, "apex", 1)] = importlib.import_module(info.name)
    for other, ours in _OTHER_NAMES.items():
        if other in compiled or other.startswith(f"{old}."):
            modules[other] = pkgutil.resolve_name(f"{_OURS}.{ours}")
    return modules
