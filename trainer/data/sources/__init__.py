"""The built-in sources of samples and the registry that opens them."""
