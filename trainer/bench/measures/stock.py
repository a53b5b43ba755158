"""The stock step, as in TorchRec's examples: its DLRM modules, default sharder and pipeline, with our optimizers."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch as StockBatch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ModuleSharder, ShardingEnv
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from trainer.config import TrainConfig
from trainer.data import Batch
from trainer.model.dlrm import table_configs
from trainer.runtime.process_group import Runtime
from trainer.sharding.local_shards import initialize_tables, replicated_parameters
from trainer.sharding.optimizers import Optimizers, fused_params
from trainer.sharding.sharded_model import ShardedModel


def build_stock(config: TrainConfig, runtime: Runtime) -> ShardedModel:
    """Build the stock model, planned, sharded and initialised as in TorchRec's examples (collective)."""
    pooling = PoolingType.SUM if config.model.pooling == "sum" else PoolingType.MEAN
    tables = table_configs(config, config.rows_per_table, pooling)
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        common: dict[str, Any] = {
            "embedding_bag_collection": collection,
            "dense_in_features": len(config.data.dense_features),
            "dense_arch_layer_sizes": list(config.model.dense_arch),
            "over_arch_layer_sizes": list(config.model.over_arch),
        }
        if config.model.interaction == "dot":
            model = DLRM(**common)
        else:
            model = DLRM_DCN(
                dcn_num_layers=config.model.dcn_num_layers, dcn_low_rank_dim=config.model.dcn_low_rank_dim, **common
            )
    task = DLRMTrain(model)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params(config.optim.sparse, runtime.device))
    group = dist.group.WORLD
    assert group is not None
    planner = EmbeddingShardingPlanner(
        topology=Topology(runtime.world_size, runtime.device.type, local_world_size=runtime.local_world_size),
        batch_size=config.train.batch_size // runtime.world_size,
        debug=False,
    )
    sharders = [cast("ModuleSharder[nn.Module]", sharder)]
    plan = planner.collective_plan(task, sharders, group)
    dmp = DistributedModelParallel(
        task, env=ShardingEnv.from_process_group(group), device=runtime.device, plan=plan, sharders=sharders
    )
    rows = dict(zip(config.table_names, config.rows_per_table, strict=True))
    initialize_tables(dmp, config.train.seed, rows, config.model.embedding_dim)
    return ShardedModel(config, runtime, plan, dmp, Optimizers(dmp, replicated_parameters(dmp), config.optim))


def stock_batch(batch: Batch) -> StockBatch:
    """Return the same samples in the class that TorchRec's DLRMTrain reads."""
    return StockBatch(batch.dense_BD, batch.sparse, batch.labels_B)
