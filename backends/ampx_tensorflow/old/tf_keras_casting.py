"""Casting of tf_keras layers (Keras 2): its own dtype policies. Imported only where tf_keras is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import tf_keras

from ampx.backend import CastPlan
from ampx.errors import ProtocolError, UnsupportedByBackendError, UnsupportedOpError
from ampx.policy import Dtype
from ampx_tensorflow.casting import policy_region
from ampx_tensorflow.oplists import ListsPlan
from ampx_tensorflow.rewrite import GraphPlan


class _Before:
    """What was before `activate`."""

    policy: Any = None


def policy_for(dtype: Dtype) -> Any:
    """Return the policy of layers with float32 variables that compute in a dtype."""
    return tf_keras.mixed_precision.Policy("float32" if dtype == "float32" else f"mixed_{dtype}")


def activate(plan: CastPlan) -> None:
    """Let layers that are made from now on compute in the plan's dtype, in all threads."""
    if _Before.policy is None:
        _Before.policy = tf_keras.mixed_precision.global_policy()
    tf_keras.mixed_precision.set_global_policy(policy_for(plan.dtype))


def deactivate() -> None:
    """Undo `activate`; layers made meanwhile keep casting."""
    if _Before.policy is not None:
        tf_keras.mixed_precision.set_global_policy(_Before.policy)
        _Before.policy = None


def region(plan: CastPlan, enabled: bool) -> AbstractContextManager[None]:
    """Return a region in which new layers cast, or do not; layers that exist keep their policy."""
    mixed_precision = tf_keras.mixed_precision
    policy = policy_for(plan.dtype if enabled else "float32")
    return policy_region(policy, mixed_precision.global_policy, mixed_precision.set_global_policy)


def is_model(candidate: object) -> bool:
    """Return whether this is a layer or model of tf_keras."""
    return isinstance(candidate, tf_keras.layers.Layer)


def prepare(model: Any, plan: CastPlan) -> Any:
    """Return a model whose layers cast already; raise where one was made before `init`, whose variables cannot."""
    if isinstance(plan, ListsPlan):
        raise UnsupportedOpError(
            "prepare got a model of tf_keras in a session with entries in allow or deny; accepted: models of Keras 3. "
            "Layers of tf_keras cast as they were made: pass dtype='float32' to those that are not to cast."
        )
    early = [layer.name for layer in model._flatten_layers() if layer.weights and layer.dtype_policy.name == "float32"]
    if early:
        raise UnsupportedByBackendError(
            f"prepare got a model of tf_keras with {len(early)} float32 layers ({', '.join(early[:5])}), whose "
            f"variables cannot be cast any more; accepted: models made after ampx.init. Make the model after it and "
            f"copy the weights: new.set_weights(old.get_weights())."
        )
    return model


def check_active(session: Any) -> None:
    """Raise where a session casts in the whole process, but tf_keras came too late for `activate`."""
    if session.casting is None or isinstance(session.casting, GraphPlan):
        return
    if session.effective.process_wide and _Before.policy is None:
        raise ProtocolError(
            "wrap_optimizer got an optimizer of tf_keras, which was imported after ampx.init, so that layers made "
            "since do not cast; accepted: importing tf_keras first. Move the import above ampx.init."
        )
