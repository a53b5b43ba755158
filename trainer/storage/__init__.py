"""Read and write object stores and local files."""
