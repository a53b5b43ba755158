"""A Kubernetes cluster that exists already: reached by a kubeconfig context, with GPUs or without."""
