"""Export a trained model to one process and predict with it."""
