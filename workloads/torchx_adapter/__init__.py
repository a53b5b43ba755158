"""The scheduler that starts a run with TorchX 0.7. Only this package imports TorchX."""

SCHEDULER = "torchrec-cloud"
COMPONENT = "workloads/launchers/torchx.py:dlrm"
