"""A GAN on a ring of Gaussians, in the style of TensorFlow 1: two optimizers, two variable scopes, one session."""

import argparse
import json
import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
NOISE = 8


def dense(inputs, units, name):
    """A fully connected layer."""
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [inputs.shape[-1], units])
        return tf.matmul(inputs, kernel) + tf.get_variable("bias", [units], initializer=tf.zeros_initializer())


def generator(noise):
    """Points in the plane."""
    with tf.variable_scope("generator"):
        hidden = tf.nn.relu(dense(noise, 64, "fc1"))
        return dense(tf.nn.relu(dense(hidden, 64, "fc2")), 2, "fc3")


def discriminator(points, reuse=False):
    """Logits: is it real?"""
    with tf.variable_scope("discriminator", reuse=reuse):
        hidden = tf.nn.leaky_relu(dense(points, 64, "fc1"))
        return dense(tf.nn.leaky_relu(dense(hidden, 64, "fc2")), 1, "fc3")


def cross_entropy(logits, label):
    """Binary cross entropy against one label."""
    return tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(logits=logits, labels=tf.fill(tf.shape(logits), label))
    )


def optimizer(rate, use_amp):
    """Adam, in mixed precision where asked for."""
    opt = tf.train.AdamOptimizer(rate, beta1=0.5)
    return tf.train.experimental.enable_mixed_precision_graph_rewrite(opt) if use_amp else opt


def main():
    """Train both; the metric is how many points lie near the ring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--amp", action="store_true")
    flags = parser.parse_args()

    tf.set_random_seed(3)
    rng = np.random.RandomState(3)
    real = tf.placeholder(tf.float32, [None, 2])
    noise = tf.placeholder(tf.float32, [None, NOISE])
    fake = generator(noise)
    real_logits, fake_logits = discriminator(real), discriminator(fake, reuse=True)
    d_loss = cross_entropy(real_logits, 1.0) + cross_entropy(fake_logits, 0.0)
    g_loss = cross_entropy(fake_logits, 1.0)
    d_vars = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, scope="discriminator")
    g_vars = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, scope="generator")
    d_train = optimizer(flags.lr, flags.amp).minimize(d_loss, var_list=d_vars)
    g_train = optimizer(flags.lr, flags.amp).minimize(g_loss, var_list=g_vars)

    losses = []
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for step in range(flags.steps):
            angles = rng.uniform(0.0, 2.0 * np.pi, [flags.batch_size])
            points = np.stack([np.cos(angles), np.sin(angles)], 1) + rng.normal(0.0, 0.05, [flags.batch_size, 2])
            seeds = rng.normal(size=[flags.batch_size, NOISE])
            d_value, _ = sess.run([d_loss, d_train], feed_dict={real: points, noise: seeds})
            g_value, _ = sess.run([g_loss, g_train], feed_dict={noise: rng.normal(size=[flags.batch_size, NOISE])})
            losses.append(float(d_value + g_value))
            if step % 250 == 0:
                sys.stdout.write(f"step {step} d_loss {d_value:.4f} g_loss {g_value:.4f}\n")
        images = sess.run(fake, feed_dict={noise: rng.normal(size=[2000, NOISE])})
    radius = np.linalg.norm(images, axis=1)
    near = float(np.mean(np.abs(radius - 1.0) < 0.3))
    sys.stdout.write(json.dumps({"losses": losses, "metric": near}) + "\n")


if __name__ == "__main__":
    main()
