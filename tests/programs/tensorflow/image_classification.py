"""Digits with a small convolutional network, in the style of TensorFlow 1: placeholders, a graph, a session."""

import argparse
import json
import sys

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

tf.disable_v2_behavior()


def conv(inputs, filters, name):
    """A convolution with bias and rectifier, halving height and width."""
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [3, 3, inputs.shape[-1], filters])
        bias = tf.get_variable("bias", [filters], initializer=tf.zeros_initializer())
        outputs = tf.nn.conv2d(inputs, kernel, strides=[1, 1, 1, 1], padding="SAME")
        outputs = tf.nn.relu(tf.nn.bias_add(outputs, bias))
        return tf.nn.max_pool(outputs, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")


def network(images):
    """Logits of ten classes."""
    hidden = conv(conv(images, 16, "conv1"), 32, "conv2")
    hidden = tf.reshape(hidden, [-1, 2 * 2 * 32])
    kernel = tf.get_variable("kernel", [2 * 2 * 32, 10])
    bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
    return tf.matmul(hidden, kernel) + bias


def main():
    """Train and test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=0.002)
    parser.add_argument("--use_fp16", action="store_true", help="automatic mixed precision")
    flags = parser.parse_args()

    tf.set_random_seed(1)
    rng = np.random.RandomState(1)
    digits = load_digits()
    data = (digits.images / 16.0).astype(np.float32)[..., np.newaxis]
    order = rng.permutation(len(data))
    data, target = data[order], digits.target[order]
    train_x, train_y, test_x, test_y = data[:1400], target[:1400], data[1400:], target[1400:]

    images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    labels = tf.placeholder(tf.int64, [None])
    logits = network(images)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    correct = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
    global_step = tf.train.get_or_create_global_step()

    opt = tf.train.AdamOptimizer(flags.learning_rate)
    if flags.use_fp16:
        opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
    train_op = opt.minimize(loss, global_step=global_step)

    losses = []
    config = tf.ConfigProto(allow_soft_placement=True)
    with tf.Session(config=config) as sess:
        sess.run(tf.global_variables_initializer())
        for epoch in range(flags.epochs):
            order = rng.permutation(len(train_x))
            for start in range(0, len(order) - flags.batch_size + 1, flags.batch_size):
                batch = order[start : start + flags.batch_size]
                feed = {images: train_x[batch], labels: train_y[batch]}
                value, _, step = sess.run([loss, train_op, global_step], feed_dict=feed)
                losses.append(float(value))
            sys.stdout.write(f"epoch {epoch} step {step} loss {np.mean(losses[-20:]):.4f}\n")
        accuracy = sess.run(correct, feed_dict={images: test_x, labels: test_y})
    sys.stdout.write(json.dumps({"losses": losses, "metric": float(accuracy)}) + "\n")


if __name__ == "__main__":
    main()
