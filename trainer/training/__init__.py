"""The training loop, evaluation and the metrics of a reporting interval."""
