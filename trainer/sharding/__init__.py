"""Embedding tables sharded over processes: planner, kernels, optimizers and the sharded model."""
