"""The protocol of a source of samples, the batch, and functions that build and check batches.

Shapes: B samples in the batch, D dense features, F sparse features, V ids in total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from trainer.config import TrainConfig
from trainer.data.checks import Where, check_ids, check_labels

Split = Literal["train", "eval"]


@dataclass
class Batch(Pipelineable):
    """One process's share of a step.

    `dense_BD` is float32. `sparse` has the F features in canonical order. `labels_B` is float32 in [0, 1]. `weights_B`
    is float32, with 0 for padding in the last batch of an evaluation; None means that all samples count.
    """

    dense_BD: Tensor
    sparse: KeyedJaggedTensor
    labels_B: Tensor
    weights_B: Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`."""
        return Batch(
            self.dense_BD.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels_B.to(device, non_blocking=non_blocking),
            None if self.weights_B is None else self.weights_B.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:  # type: ignore[override]  # as KJT has it
        """Keep the memory alive until `stream` has used it."""
        self.dense_BD.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels_B.record_stream(stream)
        if self.weights_B is not None:
            self.weights_B.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory, from which the device can copy asynchronously."""
        return Batch(
            self.dense_BD.pin_memory(),
            self.sparse.pin_memory(),
            self.labels_B.pin_memory(),
            None if self.weights_B is None else self.weights_B.pin_memory(),
        )


@dataclass(frozen=True)
class SourceContext:
    """The arguments of a source. It may create its batches on `device`; host memory always works too."""

    config: TrainConfig
    split: Split
    device: torch.device


@runtime_checkable
class Source(Protocol):
    """An endless stream of samples that is a pure function of (configuration, split, position).

    A class given as `data.source package.module:Class` is called with one `SourceContext` and must return such an
    object. `read(p, n)` returns samples p .. p+n-1 of the stream. They must not depend on the process or on the order
    of reads, so that a run can resume at any position with any number of processes. A finite data set repeats, epoch
    after epoch, reshuffled if the user enables that. Its "eval" split has a fixed order. `read` is called from one
    thread at a time. An example with one file of tensors per split (`one_id_batch` and `jagged_batch` check ids and
    labels and build the batch)::

        class Tensors:
            def __init__(self, context: SourceContext) -> None:
                self.config = context.config
                self.all = torch.load(f"{self.config.data.options['folder']}/{context.split}.pt")
                self.samples_per_epoch = len(self.all["label"])

            def read(self, position: int, count: int) -> Batch:
                rows = torch.arange(position, position + count) % self.samples_per_epoch
                features, limits = self.config.data.sparse_features, self.config.rows_per_table
                part = {name: values[rows] for name, values in self.all.items()}
                return one_id_batch(features, limits, part["dense"], part["ids"].T, part["label"], position)
    """

    @property
    def samples_per_epoch(self) -> int | None:
        """Return the samples before the stream repeats; None if it never does."""

    def read(self, position: int, count: int) -> Batch:
        """Return samples `position` .. `position + count - 1`; raise UserError for invalid data."""


@runtime_checkable
class KnowsBestAuc(Protocol):
    """A source that knows the best AUC that a model can reach."""

    def best_auc(self, count: int) -> float:
        """Return the AUC of the true probabilities on the first `count` samples of the split."""


def one_id_batch(
    features: Sequence[str],
    rows: Sequence[int] | None,
    dense_BD: Tensor,
    ids_FB: Tensor,
    labels_B: Tensor,
    position: int,
) -> Batch:
    """Return a batch with one id per feature, from ids (F, B); `position` is that of the first sample.

    Raise UserError for a bad id or label. `rows=None` skips these checks, for values that are valid by construction or
    were checked before; a check of values on a device waits for the device.
    """
    num_features, batch_size = ids_FB.shape
    if rows is not None:
        check_labels(labels_B, _in_order(position))
        for feature, limit, ids_B in zip(features, rows, ids_FB, strict=True):
            check_ids(feature, limit, ids_B, _in_order(position))
    lengths = torch.ones(num_features * batch_size, dtype=torch.int32, device=ids_FB.device)
    sparse = KeyedJaggedTensor(
        keys=list(features),
        values=ids_FB.reshape(-1),
        lengths=lengths,
        stride=batch_size,
        length_per_key=[batch_size] * num_features,
    )
    return Batch(dense_BD, sparse, labels_B)


def jagged_batch(
    features: Sequence[str],
    rows: Sequence[int] | None,
    dense_BD: Tensor,
    values_per_feature: Sequence[Tensor],
    lengths_per_feature: Sequence[Tensor],
    labels_B: Tensor,
    position: int,
) -> Batch:
    """Return a batch with any number of ids per feature, from the ids (V_f) and lengths (B) of each feature.

    The checks are those of `one_id_batch`.
    """
    if rows is not None:
        check_labels(labels_B, _in_order(position))
        for feature, limit, values_V, lengths_B in zip(
            features, rows, values_per_feature, lengths_per_feature, strict=True
        ):
            check_ids(feature, limit, values_V, _by_lengths(position, lengths_B))
    sparse = KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat(list(values_per_feature)),
        lengths=torch.cat(list(lengths_per_feature)).to(torch.int32),
        stride=labels_B.numel(),
        length_per_key=[v.numel() for v in values_per_feature],
    )
    return Batch(dense_BD, sparse, labels_B)


def _in_order(position: int) -> Where:
    """Return where the i-th value is, with one value per sample."""
    return lambda i: f"sample {position + i}"


def _by_lengths(position: int, lengths_B: Tensor) -> Where:
    """Return where the i-th id is, with lengths_B[b] ids in sample b."""
    return lambda i: f"sample {position + int(torch.searchsorted(lengths_B.cumsum(0), i, right=True))}"
