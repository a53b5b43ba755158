"""Filters for libraries that log or warn at every start, one by one with the reason. Their errors remain visible."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Install the filters; call this before torchrec is imported."""
    # Planner and metrics log internals at INFO and WARNING; the run reports its plan as a table.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    # A deprecation between torch.fx and TorchRec's tracer that users of the trainer cannot act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # The planner reports every data-parallel table as not split, on the root logger, at level ERROR.
    logging.getLogger().addFilter(lambda record: not str(record.msg).startswith("Sharding spec not found"))
    # torchmetrics 1.0.3, pinned by TorchRec, imports pkg_resources; TorchRec itself uses deprecated torch APIs.
    warnings.filterwarnings("ignore", module=r"(torchmetrics|torchrec|fbgemm_gpu|torch\.distributed\..*)(\..*)?")
    # TorchRec's call of DistributedDataParallel, which seems to come from the trainer's subclass of it.
    warnings.filterwarnings("ignore", message=r"`broadcast_buffers` is deprecated")
    # fbgemm's kernel for data-parallel tables on CPU; the trainer's tests check that its gradients are right.
    warnings.filterwarnings("ignore", message=r"fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel")
