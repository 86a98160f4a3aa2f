"""`fluid.io`: save and load what a program has trained, in Paddle's own files; and its readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import paddle
from paddle.base.io import DataLoader, PyReader
from paddle.reader import (
    buffered,
    cache,
    chain,
    compose,
    firstn,
    map_readers,
    multiprocess_reader,
    shuffle,
    xmap_readers,
)

from ampx.errors import InvalidOptionError, UnsupportedByBackendError

from .missing import refuse_missing
from .programs import Program, raw, widened

__all__ = [
    "DataLoader",
    "PyReader",
    "batch",
    "buffered",
    "cache",
    "chain",
    "compose",
    "firstn",
    "get_parameter_value",
    "get_parameter_value_by_name",
    "is_parameter",
    "is_persistable",
    "load",
    "load_inference_model",
    "load_params",
    "load_persistables",
    "load_program_state",
    "load_vars",
    "map_readers",
    "multiprocess_reader",
    "save",
    "save_inference_model",
    "save_params",
    "save_persistables",
    "save_vars",
    "set_program_state",
    "shuffle",
    "xmap_readers",
]

batch, load_program_state = paddle.batch, paddle.static.load_program_state

_MODEL: Final = "__model__"  # fluid's name for the file of an inference model
_SUFFIXES: Final = (".json", ".pdiparams")  # what Paddle 3 adds: of the program, and of its parameters


# -- variables ---------------------------------------------------------------------------------------------------


def is_parameter(var: Any) -> bool:
    """Return whether a value of a program is a parameter, running statistics included."""
    return bool(var.is_parameter or var.get_defining_op().name() == "builtin.parameter")


def is_persistable(var: Any) -> bool:
    """Return whether a value of a program is kept from run to run."""
    return bool(var.persistable)


def get_parameter_value(para: Any, executor: Any) -> Any:
    """Return a parameter's value as a NumPy array. Sync: waits for the device."""
    return get_parameter_value_by_name(para.name, executor)


def get_parameter_value_by_name(name: str, executor: Any, program: Any = None) -> Any:
    """Return the value of the parameter of a name as a NumPy array. Sync: waits for the device."""
    return np.array(_tensor(name))


def save_vars(
    executor: Any,
    dirname: str,
    main_program: Any = None,
    vars: Sequence[Any] | None = None,
    predicate: Callable[[Any], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Save variables of a program from the scope, each in a file of its name, or all in one.

    Args:
        executor: Not needed.
        dirname: The folder; it is made.
        main_program: The program; None for the default one.
        vars: The variables, or their names.
        predicate: Where `vars` is None: returns whether to save a persistable variable.
        filename: The one file; None for a file each.

    Sync: waits for the device.
    """
    tensors = {value.name: _tensor(value.name) for value in _chosen(main_program, vars, predicate)}
    folder = Path(dirname)
    folder.mkdir(parents=True, exist_ok=True)
    if filename is not None:
        ordered = dict(sorted(tensors.items()))
        _core.save_combine_func(list(ordered.values()), list(ordered), str(folder / filename), True, False, False)
        return
    for name, tensor in tensors.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _core.save_func(tensor, name, str(folder / name), True, False)


def load_vars(
    executor: Any,
    dirname: str,
    main_program: Any = None,
    vars: Sequence[Any] | None = None,
    predicate: Callable[[Any], bool] | None = None,
    filename: str | None = None,
) -> None:
    """Load variables that `save_vars` saved, by the same arguments; where one cannot be loaded, none is changed.

    The executor makes those that the scope does not have yet. Sync: waits for the device.

    Raises:
        InvalidOptionError: A file is missing, or holds another shape or dtype than the variable has.
    """
    chosen = sorted(_chosen(main_program, vars, predicate), key=lambda value: str(value.name))
    names = [value.name for value in chosen]
    loaded = [_scratch() for _ in chosen]
    folder = Path(dirname)
    try:
        if filename is not None:
            _core.load_combine_func(str(folder / filename), names, loaded, False, _cpu)
        else:
            for name, tensor in zip(names, loaded, strict=True):
                _core.load_func(str(folder / name), -1, [], False, tensor, _cpu)
    except RuntimeError as error:
        raise InvalidOptionError(
            f"{str(folder / (filename or ''))!r} cannot be loaded ({str(error).strip().splitlines()[0]}); accepted: a "
            f"folder that the same function of fluid.io saved for the same program. Check path, filename and program."
        ) from error
    for value, tensor in zip(chosen, loaded, strict=True):
        _check_fits(value, tensor)
    paddle.base.libpaddle.pir.create_loaded_parameter(
        chosen, paddle.static.global_scope(), _native(executor)._default_executor
    )
    for name, tensor in zip(names, loaded, strict=True):
        place = getattr(executor, "place", None)
        _variable(name).get_tensor().set(np.array(tensor), _cpu if place is None else place)


def save_params(executor: Any, dirname: str, main_program: Any = None, filename: str | None = None) -> None:
    """Save a program's parameters, running statistics included; see `save_vars`."""
    save_vars(executor, dirname, main_program, predicate=is_parameter, filename=filename)


def load_params(executor: Any, dirname: str, main_program: Any = None, filename: str | None = None) -> None:
    """Load what `save_params` saved; see `load_vars`."""
    load_vars(executor, dirname, main_program, predicate=is_parameter, filename=filename)


def save_persistables(executor: Any, dirname: str, main_program: Any = None, filename: str | None = None) -> None:
    """Save all that a program keeps, optimizer state and loss scale included; see `save_vars`."""
    save_vars(executor, dirname, main_program, predicate=is_persistable, filename=filename)


def load_persistables(executor: Any, dirname: str, main_program: Any = None, filename: str | None = None) -> None:
    """Load what `save_persistables` saved; see `load_vars`."""
    load_vars(executor, dirname, main_program, predicate=is_persistable, filename=filename)


def save(program: Any, model_path: str, protocol: int = 4, **configs: Any) -> None:
    """Save parameters and optimizer state to `model_path` and a suffix each. Sync: waits for the device."""
    paddle.static.save(raw(program), model_path, protocol, **configs)


def load(program: Any, model_path: str, executor: Any = None, var_list: Any = None) -> None:
    """Load what `save` saved, parameters and optimizer state. Sync: waits for the device."""
    paddle.static.load(raw(program), model_path, None if executor is None else _native(executor), var_list)


def set_program_state(program: Any, state_dict: Mapping[str, Any]) -> None:
    """Set a program's variables to what `load_program_state` returned. Sync: waits for the device."""
    paddle.static.set_program_state(raw(program), state_dict)


# -- inference models --------------------------------------------------------------------------------------------


def save_inference_model(
    dirname: str,
    feeded_var_names: str | Sequence[str],
    target_vars: Any,
    executor: Any,
    main_program: Any = None,
    model_filename: str | None = None,
    params_filename: str | None = None,
    export_for_deployment: bool = True,
    program_only: bool = False,
) -> list[str]:
    """Save the part of a program that computes some values from its inputs, with its parameters.

    Args:
        dirname: The folder; it is made.
        feeded_var_names: Names of the inputs.
        target_vars: What to compute: a value or several.
        executor: Of fluid.
        main_program: The program; None for the default one. It may hold backward and update, which are left out.
        model_filename: The program's file, `__model__` by default; Paddle 3 adds `.json`.
        params_filename: The parameters' file; by default that of the program, with `.pdiparams`.
        export_for_deployment: True: what else fluid offered is gone.
        program_only: Leave the parameters out.

    Returns:
        Numbers of the values, as text: in Paddle 3 values have no names.

    Sync: waits for the device.
    """
    if not export_for_deployment:
        raise UnsupportedByBackendError(
            "save_inference_model got export_for_deployment=False; accepted: True. Leave it out; fluid.io.save and "
            "fluid.io.save_persistables save what training needs."
        )
    program = Program(paddle.static.default_main_program()) if main_program is None else main_program
    names = [feeded_var_names] if isinstance(feeded_var_names, str) else list(feeded_var_names)
    targets = list(target_vars) if isinstance(target_vars, (list, tuple)) else [target_vars]
    values = [program.find(value) if isinstance(program, Program) else value for value in targets]
    inputs = [Program(raw(program)).global_block().var(name) for name in names]
    prefix = Path(dirname) / (model_filename or _MODEL)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    model, parameters = (prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES)
    with paddle.static.program_guard(raw(program)):
        wide = [widened(value) for value in values]
        paddle.static.save_inference_model(str(prefix), inputs, wide, _native(executor), program=raw(program))
    if program_only:
        parameters.unlink(missing_ok=True)
    elif params_filename is not None:
        parameters.replace(model.with_name(params_filename))
    return [str(number) for number in range(len(targets))]


def load_inference_model(
    dirname: str,
    executor: Any,
    model_filename: str | None = None,
    params_filename: str | None = None,
    pserver_endpoints: Any = None,
) -> list[Any]:
    """Load what `save_inference_model` saved, into the present scope; `pserver_endpoints` is None.

    Returns:
        The program, the names of its inputs, and the values to fetch.

    Sync: waits for the device.
    """
    if pserver_endpoints is not None:
        raise UnsupportedByBackendError(
            "load_inference_model got pserver_endpoints; accepted: None. Leave them out: Paddle 3 has no such servers."
        )
    prefix = Path(dirname) / (model_filename or _MODEL)
    if not prefix.with_name(prefix.name + _SUFFIXES[0]).exists():
        if prefix.exists():
            raise UnsupportedByBackendError(
                f"{str(prefix)!r} is a program of a Paddle before 3, which Paddle 3 cannot read; accepted: models that "
                f"fluid.io.save_inference_model of ampx saved. Build the program, load its parameters and save it anew."
            )
        raise InvalidOptionError(
            f"there is no inference model {str(prefix)!r}; accepted: the folder and model_filename that were passed to "
            f"save_inference_model. Check both."
        )
    options = {}
    if params_filename is not None:
        options = {"model_filename": prefix.name, "params_filename": params_filename}
    path = str(prefix.parent if options else prefix)
    program, names, targets = paddle.static.load_inference_model(path, _native(executor), **options)
    return [Program(program), names, targets]


# -- helpers -----------------------------------------------------------------------------------------------------

_core = paddle.base.core
_cpu = paddle.CPUPlace()


def _native(executor: Any) -> Any:
    """Return Paddle's executor for one of fluid's."""
    return getattr(executor, "_executor", executor)


def _chosen(program: Any, variables: Sequence[Any] | None, predicate: Callable[[Any], bool] | None) -> list[Any]:
    """List the variables that are meant: some may be given by name."""
    owner = raw(program) if program is not None else paddle.static.default_main_program()
    if variables is not None:
        block = Program(owner).global_block()
        return [block.var(item) if isinstance(item, str) else item for item in variables]
    if predicate is None:
        raise InvalidOptionError(
            "neither vars nor predicate was passed; accepted: one of them. Call save_params or save_persistables, or "
            "pass vars=[…]."
        )
    return [value for value in owner.list_vars() if value.has_name and value.persistable and predicate(value)]


def _variable(name: str) -> Any:
    return paddle.static.global_scope().find_var(name)


def _tensor(name: str) -> Any:
    variable = _variable(name)
    tensor = None if variable is None else variable.get_tensor()
    if tensor is None or not tensor._is_initialized():
        raise UnsupportedByBackendError(
            f"variable {name!r} has no value in the present scope; accepted: variables of a program whose startup "
            f"program ran in it. Run that first, inside the same fluid.scope_guard."
        )
    return tensor


def _scratch() -> Any:
    tensor = _core.DenseTensor()
    tensor.set(np.zeros(1, "float32"), _cpu)  # the loader wants one that has a place
    return tensor


def _check_fits(value: Any, tensor: Any) -> None:
    shape = [int(size) for size in tensor.shape()]
    if list(value.shape) != shape or str(tensor._dtype()) != str(value.dtype):
        raise InvalidOptionError(
            f"the file of variable {value.name!r} holds {tensor._dtype()} of shape {shape}, the program has "
            f"{value.dtype} of shape {list(value.shape)}; accepted: the same. Nothing was loaded; load the files that "
            f"this program saved."
        )


__getattr__ = refuse_missing(__name__)
