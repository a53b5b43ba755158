"""Operators and dashboards installed on a cluster, chosen by the contract's fields and never by a cloud's name."""
