"""Outputs that each cloud computes: `OUTPUTS` by resource type, and `CALLS` by function."""
