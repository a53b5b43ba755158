"""Recommender models and their interaction layers."""
