import tensorflow as tf

import ampx

amp = ampx.init("tensorflow", level="O0", loss_scale="dynamic")  # Keras's policy stays what the script made it
optimizer = ampx.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
weight = tf.Variable(1.0)
for factor in (1.0, float("inf")):
    with tf.GradientTape() as tape:
        scaled = optimizer.get_scaled_loss(weight * factor)  # as Keras 2 has it; or ampx.scale_loss
    gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
    optimizer.apply_gradients(zip(gradients, [weight], strict=True))
assert isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
assert optimizer.loss_scale == 32768.0
assert abs(float(weight) - 0.9) < 1e-6
