"""`ampx run` in TensorFlow: a script that knows nothing of ampx trains in mixed precision."""
