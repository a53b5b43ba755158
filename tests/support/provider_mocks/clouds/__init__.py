"""What each cloud computes: tables `OUTPUTS` by type of resource and `CALLS` by function."""
