"""Outputs of a cluster that exists: the API server names nothing that the program did not name itself."""

OUTPUTS: dict[str, object] = {}
CALLS: dict[str, object] = {}
