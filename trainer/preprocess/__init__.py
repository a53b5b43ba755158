"""The `preprocess` command: converts Criteo's text to files that the trainer reads."""

from trainer.preprocess.run import preprocess_main

__all__ = ["preprocess_main"]
