"""The training loop: its steps, evaluation, metrics of a reporting interval, the save schedule and the outcome."""
