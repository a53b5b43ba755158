"""The canonical form of a run's state: one unsharded tensor per table, table state and dense parameter.

Keys, with the unsharded tensor that each represents (R rows, D embedding_dim):

    tables.<table>.weight        (R, D)
    tables.<table>.<state>       (R,) for row-wise Adagrad's sum, (R, D) for others
    tables.<table>.<state>.by_columns.<widths>   (column shards, R), in addition if the plan splits columns
    dense.<parameter>            as the parameter
    dense_optim.<parameter>.<state>

Each process provides its part as ShardedTensors with the global layout or as full tensors, and DCP writes every
element once. Loading requests the same keys with the layout of the new plan. Two cases are special: data-parallel
tables are full tensors on every process, and under column-wise sharding row-wise Adagrad has one value per row *and
column shard*. An unsharded table would have the mean of squares over all columns, so the canonical value is the mean
of the shards' values weighted by their columns, and loading gives that value to every shard.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.optim.keyed import KeyedOptimizerWrapper

from trainer.sharding.local_shards import TableShard, local_shards, sharded_embeddings, sharding_of
from trainer.sharding.sharded_model import ShardedModel


class CanonicalState:
    """The state of one model as DCP sees it, for one save or load; tensors are views of the model where possible."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._kinds = sharding_of(model.dmp)
        self._shards: dict[str, list[TableShard]] = defaultdict(list)
        for shard in local_shards(model.dmp, model.optimizers, model.config.optim.sparse.optimizer):
            self._shards[shard.table].append(shard)

    def to_save(self) -> dict[str, Any]:
        """Return the state dict of this process for dcp.save (collective)."""
        state = self._tables()
        for (table, name), mean in self._column_wise_means().items():
            state[f"tables.{table}.{name}"] = mean
        state |= self._column_wise_pieces()
        state |= self._dense_parameters()
        for key, name, value in _optimizer_states(self._model.optimizers.dense):
            state[f"dense_optim.{key}.{name}"] = value
        return state

    def to_load(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the targets for dcp.load, given the saved keys with DCP's metadata; pass them to `load` afterwards."""
        state = self._tables()
        for table, name, rows in self._column_wise_states():
            state[f"tables.{table}.{name}"] = torch.empty(rows)
        state |= {key: pieces for key, pieces in self._column_wise_pieces().items() if key in saved}
        state |= self._dense_parameters()
        # Optimizers such as Adam create their state in the first step, so only the saved keys show what exists.
        held = {
            f"dense_optim.{key}.{name}": value for key, name, value in _optimizer_states(self._model.optimizers.dense)
        }
        for key, metadata in saved.items():
            if key.startswith("dense_optim."):
                existing = held.get(key)
                state[key] = (
                    torch.empty(metadata.size, dtype=metadata.properties.dtype) if existing is None else existing
                )
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy loaded values to the model where dcp.load did not write into it directly."""
        for table, name, _ in self._column_wise_states():
            if self._pieces_key(table, name) in state:
                continue  # the columns are split as in the saved plan: each shard got its own value back
            for shard in self._shards[table]:
                shard.states[name].copy_(state[f"tables.{table}.{name}"])
        optimizer = self._model.optimizers.dense
        for fqn, parameter in optimizer.params.items():
            prefix = f"dense_optim.{fqn}."
            for key, value in state.items():
                if key.startswith(prefix):
                    name = key.removeprefix(prefix)
                    optimizer.state[parameter][name] = value if name == "step" else value.to(parameter.device)

    def _tables(self) -> dict[str, Any]:
        """Return weights and states whose layout DCP can express: all but row-wise states of column-wise tables."""
        state: dict[str, Any] = {}
        for table, shards in self._shards.items():
            by_name: dict[str, list[Tensor]] = defaultdict(list)
            for shard in shards:
                by_name["weight"].append(shard.weight)
                for name, value in shard.states.items():
                    if not (self._kinds[table] == "column_wise" and value.dim() == 1):
                        by_name[name].append(value)
            for name, tensors in by_name.items():
                key = f"tables.{table}.{name}"
                state[key] = tensors[0] if self._kinds[table] == "data_parallel" else self._sharded(table, tensors)
        return state

    def _sharded(self, table: str, tensors: list[Tensor]) -> ShardedTensor:
        """Return this process's shards of one table, with the plan's layout of the whole table."""
        spec = sharded_embeddings(self._model.dmp).module_sharding_plan[table].sharding_spec
        rowwise = tensors[0].dim() == 1
        everywhere = [_without_columns(s) if rowwise else copy.deepcopy(s) for s in spec.shards]  # type: ignore[union-attr]
        mine = [s for s in everywhere if s.placement is not None and s.placement.rank() == dist.get_rank()]
        rows = self._rows(table)
        metadata = ShardedTensorMetadata(
            shards_metadata=everywhere,
            size=torch.Size([rows] if rowwise else [rows, self._model.config.model.embedding_dim]),
            tensor_properties=TensorProperties(dtype=tensors[0].dtype, requires_grad=False),
        )
        pieces = [Shard(tensor, m) for tensor, m in zip(tensors, mine, strict=True)]
        return ShardedTensor._init_from_local_shards_and_global_metadata(pieces, metadata)

    def _rows(self, table: str) -> int:
        return dict(zip(self._model.config.table_names, self._model.config.rows_per_table, strict=True))[table]

    def _column_wise_states(self) -> list[tuple[str, str, int]]:
        """Return (table, state, rows) of row-wise states under column-wise sharding, the same list on every process."""
        if self._model.config.optim.sparse.optimizer != "rowwise_adagrad":
            return []
        return [(t, "sum", self._rows(t)) for t in self._model.config.table_names if self._kinds[t] == "column_wise"]

    def _column_wise_means(self) -> dict[tuple[str, str], Tensor]:
        """Return per table the mean over column shards, weighted by columns (collective)."""
        means = {}
        for table, name, rows in self._column_wise_states():
            total = torch.zeros(rows, dtype=torch.float64, device=self._model.runtime.device)
            for shard in self._shards.get(table, []):
                total += shard.states[name].double() * shard.weight.shape[1]
            dist.all_reduce(total)
            means[table, name] = (total / self._model.config.model.embedding_dim).float().cpu()
        return means

    def _column_wise_pieces(self) -> dict[str, ShardedTensor]:
        """Return the states before averaging, (column shards, R), with which the same split resumes bit for bit."""
        pieces = {}
        for table, name, rows in self._column_wise_states():
            if table not in self._shards:
                continue
            spec = sharded_embeddings(self._model.dmp).module_sharding_plan[table].sharding_spec
            columns = sorted(spec.shards, key=lambda s: s.shard_offsets[1])  # type: ignore[union-attr]
            layout = [ShardMetadata([i, 0], [1, rows], s.placement or "rank:0/cpu") for i, s in enumerate(columns)]
            place = {s.shard_offsets[1]: metadata for s, metadata in zip(columns, layout, strict=True)}
            metadata = ShardedTensorMetadata(
                shards_metadata=layout,
                size=torch.Size([len(layout), rows]),
                tensor_properties=TensorProperties(dtype=torch.float32, requires_grad=False),
            )
            held = sorted(self._shards[table], key=lambda s: s.col)
            mine = [Shard(s.states[name].unsqueeze(0), place[s.col]) for s in held]
            pieces[self._pieces_key(table, name)] = ShardedTensor._init_from_local_shards_and_global_metadata(
                mine, metadata
            )
        return pieces

    def _pieces_key(self, table: str, name: str) -> str:
        """Return a key that contains the column split, so that only a plan with the same split finds it."""
        spec = sharded_embeddings(self._model.dmp).module_sharding_plan[table].sharding_spec
        widths = sorted((s.shard_offsets[1], s.shard_sizes[1]) for s in spec.shards)  # type: ignore[union-attr]
        return f"tables.{table}.{name}.by_columns.{'_'.join(str(width) for _, width in widths)}"

    def _dense_parameters(self) -> dict[str, Any]:
        return {f"dense.{fqn}": p.detach() for fqn, p in self._model.optimizers.dense.params.items()}


def _without_columns(shard: ShardMetadata) -> ShardMetadata:
    return ShardMetadata([shard.shard_offsets[0]], [shard.shard_sizes[0]], shard.placement or "rank:0/cpu")


def _optimizer_states(optimizer: KeyedOptimizerWrapper) -> list[tuple[str, str, Tensor]]:
    """Return (parameter, state name, tensor) of an optimizer, in a fixed order."""
    found = []
    for fqn, parameter in optimizer.params.items():
        for name, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, Tensor):
                found.append((fqn, name, value))
    return found
