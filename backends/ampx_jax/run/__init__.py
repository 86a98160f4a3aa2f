"""`ampx run` in JAX: a script that knows nothing of ampx trains in mixed precision."""
