"""Trained models in low precision, for inference."""
