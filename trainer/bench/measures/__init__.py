"""One benchmark per module."""
