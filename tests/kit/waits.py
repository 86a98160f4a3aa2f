"""What would make the host wait for an accelerator, counted on a CPU."""

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")


class CountsWaits(TorchDispatchMode):
    """Count the operations that would make the host wait for an accelerator."""

    def __init__(self):
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func.name().split(".")[0] in WAITS
        return func(*args, **(kwargs or {}))
