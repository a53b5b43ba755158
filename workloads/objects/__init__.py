"""Kubernetes objects as pure functions of a run's facts."""
