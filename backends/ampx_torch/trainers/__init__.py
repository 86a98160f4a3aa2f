"""Trainers of other libraries on ampx: `lightning` for Lightning and Fabric, `accelerate` for Accelerate and Trainer.

Nothing here is imported unless a script asks for it.
"""
