"""One rule per file: what it checks, what it rejects and its options."""
