"""Google Cloud: a private GKE cluster with an accelerator pool, Filestore, a bucket and a registry."""
