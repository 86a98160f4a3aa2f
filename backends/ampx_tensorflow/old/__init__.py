"""The mixed precision of TensorFlow 1 and of Keras 2, under the names of then, with ampx underneath."""
