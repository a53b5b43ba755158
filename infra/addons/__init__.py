"""Operators and dashboards on top of a cluster, driven by the contract's fields and never by a cloud's name."""
