"""`python -m trainer bench`: our step beside the stock TorchRec step, and the speed of the sources, as ratios in one
run."""

from trainer.bench.command import bench_main

__all__ = ["bench_main"]
