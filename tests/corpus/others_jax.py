"""JAX's `jax_debug_nans` on a script whose products are computed in low precision by `native_jax.py`: see `others.py`.

With `jax_debug_infs` it finds what overflows, too.
"""

import sys

import jax
import jax.numpy as jnp
import native_jax
from others import answer, lines_in, said_by


def main():
    tool, dtype, script, *options = sys.argv[1:]
    native_jax.STATE["dtype"] = jnp.dtype(dtype)
    native_jax.cast_products()
    jax.config.update("jax_debug_nans", True)
    jax.config.update("jax_debug_infs", tool == "jax_debug_infs")
    text = said_by(script, options)
    # Of a backward pass the error has as its cause the lines that were differentiated.
    lines = lines_in(script, text.partition("JaxStackTraceBeforeTransformation")[0])
    answer(script, text, blamed="FloatingPointError" in text, line=lines[-1] if lines else None)


if __name__ == "__main__":
    main()
