"""An existing Kubernetes cluster, with or without GPUs, that a kubeconfig context leads to."""
