"""Kubernetes objects as pure functions of the run's facts."""
