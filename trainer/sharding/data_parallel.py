"""The replicated weights' gradients: summed by DistributedDataParallel in the same order in every step of every start.

DistributedDataParallel puts gradients into buckets, and after the first step into others, by the order in which they
came. A sum over three or more processes depends on a gradient's place in its bucket (each part of a ring's buffer
begins at another process), so the first step after a restart would differ in the last bits from the same step of a run
that nobody stopped. Here the buckets are settled before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv


class SettledDataParallel(DistributedDataParallel):
    """Its buckets follow the reverse order of the layers, in which their gradients come, from the first step on."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        settle(self)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


class SettledWrapper(DataParallelWrapper):
    """TorchRec's DefaultDataParallelWrapper with settled buckets, those of data-parallel tables included."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Collective: see DataParallelWrapper."""
        module = dmp._dmp_wrapped_module
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):  # made by TorchRec, for data-parallel tables
                settle(part)
        sharded = set(DistributedModelParallel._sharded_parameter_names(module))
        if {name for name, _ in dmp.named_parameters()} <= sharded:
            return
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sharded)  # type: ignore[no-untyped-call]
        dmp._dmp_wrapped_module = SettledDataParallel(
            module.to(device),
            device_ids=None if device.type == "cpu" else [device],
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
            static_graph=True,
        )


def settle(parallel: DistributedDataParallel) -> None:
    """Collective: give the buckets the layout that they would else take on after the first step."""
    parallel.reducer._push_all_rebuilt_params()
    parallel.reducer._rebuild_buckets()
