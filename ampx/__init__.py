"""One mixed-precision API for every framework.

```python
import ampx

amp = ampx.init(framework="torch")
opt = ampx.wrap_optimizer(opt)
for x, y in data:
    loss = loss_fn(model(x), y)
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    opt.zero_grad()
```
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__version__ = "0.1.0"


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name, as `__init__.pyi` has them: the names are written there and nowhere else.

    They load on first use: a script that imports ampx and then fails, or only asks for --help, does not wait for what
    it does not need.
    """
    import ast  # not before it is needed: it is a good part of what `import ampx` would cost
    import pkgutil

    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or alias.name for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .rooms import parts_needed

    with parts_needed(f"ampx.{name}"):
        module = importlib.import_module(f".{_homes()[name]}", __name__)
    value = module if name == "debug" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_homes())
