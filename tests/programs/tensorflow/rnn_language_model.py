"""A recurrent language model over characters, in the style of TensorFlow 1: unrolled, gradients clipped by norm."""

import argparse
import json
import sys
import this

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
CELLS = 96


def text():
    """The Zen of Python, as shipped with it: rotated by thirteen."""
    return "".join(this.d.get(letter, letter) for letter in this.s)


def gru(inputs, state):
    """One step of a gated recurrent unit."""
    with tf.variable_scope("gru", reuse=tf.AUTO_REUSE):
        size = inputs.shape[-1] + CELLS
        gates = tf.get_variable("gates", [size, 2 * CELLS])
        gate_bias = tf.get_variable("gate_bias", [2 * CELLS], initializer=tf.ones_initializer())
        candidate = tf.get_variable("candidate", [size, CELLS])
        bias = tf.get_variable("bias", [CELLS], initializer=tf.zeros_initializer())
    both = tf.sigmoid(tf.matmul(tf.concat([inputs, state], 1), gates) + gate_bias)
    reset, update = tf.split(both, 2, axis=1)
    new = tf.tanh(tf.matmul(tf.concat([inputs, reset * state], 1), candidate) + bias)
    return update * state + (1.0 - update) * new


def main():
    """Train; the metric is the perplexity over the last fifty steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--unroll", type=int, default=16)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--amp", action="store_true")
    flags = parser.parse_args()

    tf.set_random_seed(5)
    rng = np.random.RandomState(5)
    letters = sorted(set(text()))
    data = np.array([letters.index(letter) for letter in text()])
    tokens = tf.placeholder(tf.int32, [flags.batch_size, flags.unroll + 1])
    embedding = tf.get_variable("embedding", [len(letters), 32])
    embedded = tf.nn.embedding_lookup(embedding, tokens)
    projection = tf.get_variable("projection", [CELLS, len(letters)])
    state, total = tf.zeros([flags.batch_size, CELLS]), 0.0
    for position in range(flags.unroll):
        state = gru(embedded[:, position], state)
        logits = tf.matmul(state, projection)
        labels = tokens[:, position + 1]
        total += tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    loss = total / flags.unroll

    opt = tf.train.AdamOptimizer(0.004)
    if flags.amp:
        opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt, loss_scale="dynamic")
    grads, variables = zip(*opt.compute_gradients(loss), strict=True)
    clipped, norm = tf.clip_by_global_norm(grads, flags.clip)
    train_op = opt.apply_gradients(zip(clipped, variables, strict=True))

    losses = []
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for step in range(flags.steps):
            starts = rng.randint(0, len(data) - flags.unroll - 1, flags.batch_size)
            batch = np.stack([data[start : start + flags.unroll + 1] for start in starts])
            value, size, _ = sess.run([loss, norm, train_op], feed_dict={tokens: batch})
            losses.append(float(value))
            if step % 50 == 0:
                sys.stdout.write(f"step {step} loss {value:.4f} gradient norm {size:.3f}\n")
    perplexity = float(np.exp(np.mean(losses[-50:])))
    sys.stdout.write(json.dumps({"losses": losses, "metric": perplexity}) + "\n")


if __name__ == "__main__":
    main()
