"""What stands between a stack and a running job, before money is spent, and why one that is up does not train."""
