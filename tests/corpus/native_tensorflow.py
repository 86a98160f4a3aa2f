"""What a script of Keras does under Keras's own policy, without ampx: the evidence for `tensorflow/truth.toml`.

python tests/corpus/native_tensorflow.py float16 tests/corpus/scripts/tensorflow/rms_norm.py [--float32 NAME ...]
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import runpy
import sys
import tempfile
import traceback

import keras
import numpy as np
import tensorflow as tf

from corpus import options_of


def floats(tree):
    return [x for x in tf.nest.flatten(tree) if isinstance(x, tf.__internal__.EagerTensor) and x.dtype.is_floating]


def run(script, options, dtype, kept, eager=True):
    """Run the script; return losses, layers that are not finite of finite inputs, and outputs of the first step."""
    tf.config.run_functions_eagerly(eager)
    if dtype:
        keras.mixed_precision.set_global_policy(f"mixed_{dtype}")
    make, call = keras.layers.Layer.__init__, keras.layers.Layer.__call__
    broken, outputs = [], {}

    def __init__(layer, *args, **kwargs):  # noqa: N807
        make(layer, *args, **{**kwargs, **({"dtype": "float32"} if kwargs.get("name") in kept else {})})

    def __call__(layer, *args, **kwargs):  # noqa: N807
        result = call(layer, *args, **kwargs)
        values = floats(result)
        if values:
            outputs.setdefault(layer.name, np.concatenate([v.numpy().astype("float32").ravel() for v in values]))
            bad = [v for v in values if not np.isfinite(v.numpy().astype("float32")).all()]
            fine = all(np.isfinite(v.numpy().astype("float32")).all() for v in floats([args, kwargs]))
            if bad and fine and len(broken) < 4:
                broken.append((layer.name, bad[0].dtype.name))
        return result

    keras.layers.Layer.__init__, keras.layers.Layer.__call__ = __init__, __call__
    sys.argv, printed, raised = [script, *options], io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            raised = f"{type(error).__name__}: {str(error)[:200]}"
    losses = [] if raised else json.loads(printed.getvalue().splitlines()[-1])
    return {"losses": losses, "broken": broken, "outputs": outputs, "raised": raised}


def forked(*arguments):
    with tempfile.NamedTemporaryFile() as file:
        if os.fork() == 0:
            try:
                file.write(pickle.dumps(run(*arguments)))
                file.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.wait()
        with open(file.name, "rb") as answer:
            return pickle.load(answer)


def show(title, run, exact):
    print(f"   {title:9}", " ".join(f"{loss:.4g}" for loss in run["losses"]), run["raised"] or "", run["broken"])
    if run is not exact and run["losses"] and len(run["losses"]) == len(exact["losses"]):
        print(
            "   difference",
            np.max(np.abs(np.subtract(run["losses"], exact["losses"]))) / np.max(np.abs(exact["losses"])),
        )
        rows = [
            (float(np.linalg.norm(run["outputs"][name] - value) / max(np.linalg.norm(value), 1e-30)), name)
            for name, value in exact["outputs"].items()
            if name in run["outputs"] and run["outputs"][name].shape == value.shape
        ]
        print("      first step:", [(round(error, 4), name) for error, name in rows])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype")
    parser.add_argument("scripts", nargs="+")
    parser.add_argument("--float32", nargs="*", default=[])
    arguments = parser.parse_args()
    for script in arguments.scripts:
        print("==", os.path.basename(script), arguments.dtype)
        for options in options_of(script):
            exact = forked(script, options, None, [])
            show("float32:", exact, exact)
            show("low:", forked(script, options, arguments.dtype, []), exact)
            show("compiled:", forked(script, options, arguments.dtype, [], False), exact)
            if arguments.float32:
                show("kept:", forked(script, options, arguments.dtype, arguments.float32), exact)


if __name__ == "__main__":
    main()
