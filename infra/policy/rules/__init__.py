"""One rule a file: what it looks at, what it refuses, what may be configured."""
