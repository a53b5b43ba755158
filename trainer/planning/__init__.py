"""Predict memory, traffic and throughput of a configuration without training it."""
