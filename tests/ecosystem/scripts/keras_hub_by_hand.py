"""A language model of KerasHub in a loop by hand."""

import json

import keras
import keras_hub
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(0)
backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=60,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
    max_sequence_length=8,
    dropout=0.0,
)
model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
optimizer = keras.optimizers.AdamW(0.01)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step(tokens):
    with tf.GradientTape() as tape:
        inputs = {"token_ids": tokens, "padding_mask": tf.ones_like(tokens)}
        loss = loss_of(tokens[:, 1:], model(inputs, training=True)[:, :-1])
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


batches = np.random.default_rng(0).integers(0, 60, (4, 4, 8))
print(json.dumps([float(step(tf.constant(tokens, tf.int32))) for tokens in batches]))
