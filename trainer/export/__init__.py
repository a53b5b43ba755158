"""Export a trained model for a single process, and predict with it."""
