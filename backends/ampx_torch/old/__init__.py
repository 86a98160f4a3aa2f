"""Recipes of PyTorch's former mixed precision."""
