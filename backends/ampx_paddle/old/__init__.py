"""Recipes of Paddle's former mixed precision."""
