"""Hooks on modules that a script did not ask for: no copy and no pickle of its modules takes them along."""

from __future__ import annotations

import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

_TABLES: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class _Lent:
    """The tables of modules that hold lent hooks, by identity, with the numbers of these hooks."""

    tables: Final[dict[int, tuple[Any, set[int]]]] = {}
    native: Any = None  # how tables were reduced before
    lock: Final = threading.Lock()


def lend(module: nn.Module, handles: Sequence[RemovableHandle]) -> Callable[[], None]:
    """Keep hooks of a module out of its copies and pickles; return what takes them off the module."""
    tables = [getattr(module, name) for name in _TABLES]
    numbers = {handle.id for handle in handles}
    with _Lent.lock:
        if not _Lent.tables:
            _Lent.native = copyreg.dispatch_table.get(OrderedDict)
            copyreg.pickle(OrderedDict, _reduce)
        for table in tables:
            _Lent.tables.setdefault(id(table), (table, set()))[1].update(numbers)

    def take_back() -> None:
        for handle in handles:
            handle.remove()
        with _Lent.lock:
            for table in tables:
                lent = _Lent.tables[id(table)][1]
                lent -= numbers
                if not lent:
                    del _Lent.tables[id(table)]
            if not _Lent.tables and copyreg.dispatch_table.get(OrderedDict) is _reduce:
                if _Lent.native is None:
                    del copyreg.dispatch_table[OrderedDict]
                else:
                    copyreg.dispatch_table[OrderedDict] = _Lent.native

    return take_back


def _reduce(table: OrderedDict[Any, Any]) -> Any:
    """Return what a copy or a pickle of a dictionary is made of: of a table with lent hooks, all but these."""
    reduced: Any = table.__reduce__() if _Lent.native is None else _Lent.native(table)
    entry = _Lent.tables.get(id(table))
    if entry is None:
        return reduced
    make, arguments, state, elements, items = reduced
    return make, arguments, state, elements, iter([item for item in items if item[0] not in entry[1]])
