"""A cluster on Azure: AKS with an ND pool, NetApp Files, Blob storage, a registry and managed Prometheus."""
