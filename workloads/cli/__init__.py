"""Commands of `python -m workloads` that show or control a run."""
