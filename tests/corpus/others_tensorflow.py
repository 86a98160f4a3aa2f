"""TensorFlow's `enable_check_numerics` on a script of Keras under Keras's own policy: see `others.py`."""

import re
import sys

import keras
import tensorflow as tf
from others import answer, lines_in, said_by


def main():
    _, dtype, script, *options = sys.argv[1:]
    tf.config.run_functions_eagerly(True)  # else an operation has no line of the script
    keras.config.disable_traceback_filtering()
    keras.mixed_precision.set_global_policy(f"mixed_{dtype}")
    tf.debugging.enable_check_numerics()
    text = said_by(script, options)
    lines = lines_in(script, text)
    words = " ".join(re.findall(r"!!! Detected.*?!!!", text)) or text  # and whole tensors, which say nothing here
    answer(script, words, blamed="Traceback" in text, line=lines[-1] if lines else None)


if __name__ == "__main__":
    main()
