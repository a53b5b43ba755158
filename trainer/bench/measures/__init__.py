"""The benchmarks, one per module, and what they share."""
