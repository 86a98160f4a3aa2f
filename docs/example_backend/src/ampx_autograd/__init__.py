"""autograd backend for ampx."""

import ampx


@ampx.hookimpl
def ampx_register_backends(register: ampx.Register) -> None:
    """Register autograd."""
    register("autograd", load, roots=("autograd", "ampx_autograd"), requires="autograd>=1.8")


def load() -> ampx.Backend:
    """Return the backend, importing autograd."""
    from .backend import AutogradBackend

    return AutogradBackend()
