"""Loggers: the loss scale, skipped steps, gradient norms and the meter, in TensorBoard, W&B, MLflow, JSON lines."""
