"""What a script of JAX does with its products in low precision, without ampx: the evidence for `jax/truth.toml`.

JAX casts nothing by itself. Here every program that the script differentiates is read as a jaxpr, and its equations are
computed one by one: products in the dtype, sums and exponentials in float32, all else in the widest dtype it is given,
which is what casting by lists means. Equations in modules that `--float32` names compute in float32.

    python tests/corpus/native_jax.py float16 tests/corpus/scripts/jax/linen_mask.py
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from corpus import options_of

LOW = ("dot_general", "conv_general_dilated")
WIDE = ("exp", "log", "log1p", "integer_pow", "square", "rsqrt", "reduce_sum", "cumsum", "logistic", "erf", "pow")
AS_IT_IS = ("convert_element_type",)
STATE = {"dtype": None, "kept": (), "broken": [], "values": {}}


def is_float(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def cast(values, dtype):
    return [jnp.asarray(x).astype(dtype) if is_float(x) else x for x in values]


def evaluate(jaxpr, constants, arguments):
    values = {}

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

    values.update(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inputs = [read(variable) for variable in equation.invars]
        inner = next((p for p in equation.params.values() if isinstance(p, (ClosedJaxpr, Jaxpr))), None)
        if inner is not None and name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat"):
            closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            outputs = evaluate(closed.jaxpr, closed.consts, inputs)
        elif name == "scan":
            outputs = scanned(equation.params, inputs)
        else:
            where = str(equation.source_info.name_stack)
            widths = [jnp.result_type(x) for x in inputs if is_float(x) and not isinstance(x, float)]
            dtype = STATE["dtype"] if name in LOW else jnp.float32 if name in WIDE else None
            if dtype is None and widths:
                dtype = jnp.result_type(*widths)
            if any(kept in where for kept in STATE["kept"]):
                dtype = jnp.float32
            if widths and name not in AS_IT_IS:
                inputs = cast(inputs, dtype)
            params = dict(equation.params)
            if name in LOW and "preferred_element_type" in params:
                params["preferred_element_type"] = jnp.dtype(dtype)
            bound = equation.primitive.get_bind_params(params)
            functions, bound = ((), bound) if isinstance(bound, dict) else bound
            with source_info_util.user_context(equation.source_info.traceback):  # for what names the script's line
                outputs = equation.primitive.bind(*functions, *inputs, **bound)
            outputs = list(outputs) if equation.primitive.multiple_results else [outputs]
            note(name, where, inputs, outputs, equation.source_info)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def scanned(params, inputs):
    """Compute a scan step by step; what it carries keeps its dtype, as JAX demands."""
    constants, carried = params["num_consts"], params["num_consts"] + params["num_carry"]
    constant, carry, sequences = inputs[:constants], inputs[constants:carried], inputs[carried:]
    rows = []
    for position in reversed(range(params["length"])) if params["reverse"] else range(params["length"]):
        step = [*constant, *carry, *(sequence[position] for sequence in sequences)]
        outputs = evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, step)
        new, row = outputs[: params["num_carry"]], outputs[params["num_carry"] :]
        carry = [x.astype(jnp.result_type(old)) for x, old in zip(new, carry, strict=True)]
        rows.append(row)
    rows = rows[::-1] if params["reverse"] else rows
    return [*carry, *(jnp.stack(column) for column in zip(*rows, strict=True))]


def note(name, where, inputs, outputs, source):
    def check(*leaves):
        ins, outs = leaves[: len(inputs)], leaves[len(inputs) :]
        bad = [x for x in outs if np.issubdtype(x.dtype, np.floating) or "float" in str(x.dtype)]
        if any(not np.isfinite(x.astype("float32")).all() for x in bad):
            fine = all("float" not in str(x.dtype) or np.isfinite(x.astype("float32")).all() for x in ins)
            if fine and len(STATE["broken"]) < 4:
                STATE["broken"].append((where, name, str(bad[0].dtype), source_info_util.summarize(source)))

    jax.debug.callback(check, *inputs, *outputs)


def low(function):
    def run(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [position for position, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def flat(*values):
            rest = list(leaves)
            for position, value in zip(arrays, values, strict=True):
                rest[position] = value
            args, kwargs = jax.tree.unflatten(tree, rest)
            return function(*args, **kwargs)

        values = [leaves[position] for position in arrays]
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*values)
        outputs = evaluate(closed.jaxpr, closed.consts, values)
        shapes, tree_of_outputs = jax.tree.flatten(shape)
        outputs = [x.astype(s.dtype) if is_float(x) else x for x, s in zip(outputs, shapes, strict=True)]
        return jax.tree.unflatten(tree_of_outputs, outputs)

    return run


def cast_products():
    """Have whatever is differentiated computed in low precision."""
    import equinox
    from flax import nnx

    differentiate = jax.value_and_grad
    jax.value_and_grad = lambda f, *a, **k: differentiate(low(f), *a, **k)

    def of_equinox(f):
        def call(model, *rest):
            arrays, others = equinox.partition(model, equinox.is_inexact_array)
            return differentiate(low(lambda arrays: f(equinox.combine(arrays, others), *rest)))(arrays)

        return call

    def of_flax(f):
        def call(model):
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            return differentiate(low(lambda params: f(nnx.merge(graph, params, rest))))(params)

        return call

    equinox.filter_value_and_grad, nnx.value_and_grad = of_equinox, of_flax


def run(script, options, dtype, kept):
    STATE.update(dtype=dtype, kept=kept, broken=[])
    if dtype:
        cast_products()
    sys.argv, printed, raised = [script, *options], io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            raised = f"{type(error).__name__}: {str(error)[:300]}"
    jax.effects_barrier()
    losses = [] if raised else json.loads(printed.getvalue().splitlines()[-1])
    print(
        "  ",
        (dtype and str(jnp.dtype(dtype))) or "float32",
        *kept,
        ":",
        " ".join(f"{x:.4g}" for x in losses),
        raised or "",
    )
    for row in STATE["broken"]:
        print("      not finite:", row)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype")
    parser.add_argument("scripts", nargs="+")
    parser.add_argument("--float32", nargs="*", default=[])
    arguments = parser.parse_args()
    for script in arguments.scripts:
        print("==", os.path.basename(script), arguments.dtype)
        kept = [(arguments.dtype, arguments.float32)] if arguments.float32 else []
        for options in options_of(script):
            for dtype, modules in [(None, []), (arguments.dtype, []), *kept]:
                if os.fork() == 0:
                    run(script, options, dtype and jnp.dtype(dtype), modules)
                    sys.stdout.flush()
                    os._exit(0)
                os.wait()


if __name__ == "__main__":
    main()
