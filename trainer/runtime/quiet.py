"""Libraries that talk on every start, each silenced by name with the reason; errors of theirs still come through."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Call before torchrec is imported."""
    # Planner and metrics report their inner life at INFO and WARNING; the plan that matters is our own table.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    # A deprecation between torch.fx and TorchRec's tracer that no user of ours can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # The planner says of every data-parallel table that it is not split, on the root logger, as if it were an error.
    logging.getLogger().addFilter(lambda record: not str(record.msg).startswith("Sharding spec not found"))
    # torchmetrics 1.0.3, pinned by TorchRec, imports pkg_resources; TorchRec itself uses deprecated torch APIs.
    warnings.filterwarnings("ignore", module=r"(torchmetrics|torchrec|fbgemm_gpu|torch\.distributed\..*)(\..*)?")
    # Of TorchRec's call of DistributedDataParallel, which seems to come from our subclass of it.
    warnings.filterwarnings("ignore", message=r"`broadcast_buffers` is deprecated")
    # fbgemm's kernel for data-parallel tables on CPU; that its gradients are right, our tests see.
    warnings.filterwarnings("ignore", message=r"fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel")
