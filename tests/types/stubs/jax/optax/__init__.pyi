from typing import Any, NamedTuple, Protocol, TypeVar

Params = TypeVar("Params")
OptState = Any
Updates = Any

class TransformInitFn(Protocol):
    def __call__(self, params: Any) -> OptState: ...

class TransformUpdateFn(Protocol):
    def __call__(self, updates: Updates, state: OptState, params: Any | None = None) -> tuple[Updates, OptState]: ...

class GradientTransformation(NamedTuple):
    init: TransformInitFn
    update: TransformUpdateFn

class GradientTransformationExtraArgs(GradientTransformation): ...

def adam(learning_rate: float) -> GradientTransformationExtraArgs: ...
def apply_updates(params: Params, updates: Updates) -> Params: ...
