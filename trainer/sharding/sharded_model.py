"""The sharded model: model, sharding plan and optimizers of this process. Training, evaluation and bench use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.model.dlrm import TrainTask, build_model
from trainer.runtime.process_group import Runtime
from trainer.sharding.data_parallel import FixedBucketsWrapper
from trainer.sharding.local_shards import fused_kernels, initialize_tables, pooled_dists, replicated_parameters
from trainer.sharding.optimizers import Optimizers
from trainer.sharding.planner import Hardware, find_plan, make_sharder
from trainer.sharding.rowwise_adagrad import use_coalesced_update
from trainer.sharding.shared_memory_all_to_all import use_shared_memory


@dataclass
class ShardedModel:
    """A sharded model and its optimizers on this process."""

    config: TrainConfig
    runtime: Runtime
    plan: ShardingPlan
    dmp: DistributedModelParallel
    optimizers: Optimizers
    resolved: dict[str, str] = field(default_factory=dict)  # the choice made for options that are `auto`


def build_sharded_model(config: TrainConfig, runtime: Runtime, task: nn.Module | None = None) -> ShardedModel:
    """Plan, shard and initialise the model; raise UserError if the configuration does not fit the job. Collective."""
    try:
        config.check_world_size(runtime.world_size)
    except ValueError as error:
        raise UserError(str(error)) from None
    task = task or TrainTask(build_model(config, runtime.precision))
    group = torch.distributed.group.WORLD
    assert group is not None
    sharder = make_sharder(config, runtime.device)
    plan = find_plan(task, sharder, config, Hardware.of_job(runtime), group)
    dmp = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(group),
        device=runtime.device,
        plan=plan,
        sharders=[cast("ModuleSharder[nn.Module]", sharder)],
        data_parallel_wrapper=FixedBucketsWrapper(),
    )
    rows = dict(zip(config.table_names, config.rows_per_table, strict=True))
    initialize_tables(dmp, config.train.seed, rows, config.model.embedding_dim)
    resolved = {
        "update": use_coalesced_update(fused_kernels(dmp), config.optim.sparse, runtime.device),
        "exchange": use_shared_memory(pooled_dists(dmp), config, runtime),
    }
    return ShardedModel(config, runtime, plan, dmp, Optimizers(dmp, replicated_parameters(dmp), config.optim), resolved)
