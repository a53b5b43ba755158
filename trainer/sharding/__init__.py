"""Embedding tables across processes: planner, kernels, optimizers, the sharded model."""
