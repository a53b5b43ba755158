"""Read and write object stores and local files: retries, atomic writes, `fetch`."""
