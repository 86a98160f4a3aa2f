"""Traces steps on two replicas, which are CPUs, and writes them as TensorFlow's `MetaGraphDef`s.

    replicas_for_gpu.py FOLDER "DTYPE LEVEL"...

Started by test_rewritten_for_gpu.py, which has them rewritten for two GPUs. TensorFlow's collective operations are what
MirroredStrategy reduces by on both; only where they run, and the hint how, differ.
"""

import os
import pathlib
import sys
import warnings
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import ampx
from ampx_tensorflow import keras3, replicas
from keras_networks import Products, layers

# What is planted into the step in float16 at O1.
FAULTS = ("native", "alone", "low sums")


def traced(strategy, network, dtype, level, bound=None, native=False):
    """Return the step of both replicas: forward, backward, unscaling, the test on all replicas, sums and the update."""
    amp = ampx.init("tensorflow", device="cpu", dtype=dtype, level=level, loss_scale="dynamic")
    with strategy.scope():
        model, opt = network(), keras.optimizers.Adam(0.01)
        opt = keras.optimizers.LossScaleOptimizer(opt) if native else amp.wrap_optimizer(opt, max_grad_norm=bound)
        if level in ("O2", "O3"):
            amp.prepare(model, opt)
        variables = model.trainable_variables
        opt.build(variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(tf.reduce_mean(tf.square(tf.cast(model(x), tf.float32) - y)))
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @tf.function
    def step(x, y):
        return strategy.experimental_local_results(strategy.run(replica_step, args=(x, y)))

    def shares(*shape):
        return strategy.experimental_distribute_values_from_function(lambda context: tf.ones(shape))

    graph = step.get_concrete_function(shares(4, 8), shares(4, 1)).graph
    with graph.as_default():
        for output in [*graph.outputs, *graph.control_outputs]:
            tf.compat.v1.add_to_collection("train_op", output)
        return tf.compat.v1.train.export_meta_graph(graph=graph)


def planted(strategy, fault):
    """Return a step with a fault, which the tests have to notice."""
    if fault == "native":
        return traced(strategy, layers, "float16", "O1", native=True)
    if fault == "alone":
        with mock.patch.object(replicas, "everywhere", lambda finite: finite):
            return traced(strategy, layers, "float16", "O1")
    apply = keras3.AmpOptimizer._apply

    def apply_rounded(self, grads, variables):
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.cast(grad, tf.float16) for grad in grads])
        apply(self, replicas.shared([tf.cast(grad, tf.float32) for grad in sums]), variables)

    with mock.patch.object(keras3.AmpOptimizer, "_apply", apply_rounded):
        return traced(strategy, layers, "float16", "O1")


def main():
    folder, policies = pathlib.Path(sys.argv[1]), sys.argv[2:]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in float16

    def keep(name, exported):
        (folder / f"{name}.meta").write_bytes(exported.SerializeToString())

    for policy in policies:
        keep(policy, traced(strategy, layers, *policy.split()))
    keep("clipped", traced(strategy, layers, "float16", "O2", bound=1.0))
    keep("products", traced(strategy, Products, "float16", "O1"))
    for fault in FAULTS:
        keep(fault, planted(strategy, fault))


if __name__ == "__main__":
    main()
