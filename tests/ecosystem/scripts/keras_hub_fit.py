"""A classifier on a backbone of KerasHub, by `fit`."""

import json

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=60,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
    max_sequence_length=8,
    dropout=0.0,
)
model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, dropout=0.0, preprocessor=None)
model.compile(
    optimizer=keras.optimizers.Adam(0.01), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[]
)
tokens = np.random.default_rng(0).integers(0, 60, (16, 8))
inputs = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": np.ones_like(tokens)}
history = model.fit(inputs, tokens[:, 0] % 2, batch_size=16, epochs=4, shuffle=False, verbose=0)
print(json.dumps(history.history["loss"]))
