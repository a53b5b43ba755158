"""Checks that find out why a stack cannot be created, or why its job does not train."""
