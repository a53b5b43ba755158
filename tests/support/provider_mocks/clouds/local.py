"""Outputs of an existing cluster: none, because the program chooses all names."""

OUTPUTS: dict[str, object] = {}
CALLS: dict[str, object] = {}
