"""The state of a run, read from the Kubernetes API and from the stack's outputs."""
