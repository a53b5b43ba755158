"""The `bench` command: compares our step, sources, saves and preprocessing with reference implementations."""

from trainer.bench.command import bench_main

__all__ = ["bench_main"]
