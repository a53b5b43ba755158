"""Data parallelism with fixed gradient buckets, so that gradients are summed in the same order after a restart.

DistributedDataParallel puts gradients into buckets, and rebuilds the buckets after the first step by the order in which
gradients became ready. A sum over three or more processes depends on a gradient's place in its bucket, because each
part of a ring's buffer starts at another process. So the first step after a restart would differ in the last bits from
the same step of an uninterrupted run. Building the final buckets before the first step prevents that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv


class FixedBucketsDataParallel(DistributedDataParallel):
    """DistributedDataParallel with buckets in reverse order of the layers, the order of gradients, from the start."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        fix_buckets(self)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class FixedBucketsWrapper(DataParallelWrapper):
    """TorchRec's DefaultDataParallelWrapper with fixed buckets, also for data-parallel tables."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the replicated part of `dmp`. Collective."""
        module = dmp._dmp_wrapped_module
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):  # created by TorchRec for data-parallel tables
                fix_buckets(part)
        sharded = set(DistributedModelParallel._sharded_parameter_names(module))
        if {name for name, _ in dmp.named_parameters()} <= sharded:
            return
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sharded)  # type: ignore[no-untyped-call]
        dmp._dmp_wrapped_module = FixedBucketsDataParallel(
            module.to(device),
            device_ids=None if device.type == "cpu" else [device],
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
            static_graph=True,
        )


def fix_buckets(parallel: DistributedDataParallel) -> None:
    """Build the buckets that DistributedDataParallel would otherwise build after the first step. Collective."""
    parallel.reducer._push_all_rebuilt_params()
    parallel.reducer._rebuild_buckets()
