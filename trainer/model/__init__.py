"""The recommender models and their interaction layers."""
