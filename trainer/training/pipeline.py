"""One step of training or evaluation, with TorchRec's pipelines or without one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from trainer.data import Batch
from trainer.sharding.sharded_model import ShardedModel

Output = tuple[Tensor, Tensor, Tensor, Tensor | None]  # loss (), logits (B), labels (B), weights (B) or None


class Pipeline:
    """Runs a sharded model over batches. In training mode each step also computes gradients and updates the weights.

    A pipeline reads up to two batches ahead of the step that it returns. `detach` releases the model for another
    pipeline; `attach` takes it back and continues with the batches that were read ahead.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        kind = model.config.train.pipeline
        optimizer, device = model.optimizers.combined, model.runtime.device
        self._sparse: TrainPipelineSparseDist[Batch, Output] | None = None
        self._base: TrainPipelineBase[Batch, Output] | None = None
        if kind == "sparse_dist":
            self._sparse = TrainPipelineSparseDist(model.dmp, optimizer, device, execute_all_batches=True)
        elif kind == "base":
            self._base = TrainPipelineBase(model.dmp, optimizer, device)

    def run(self, batches: Iterator[Batch]) -> Iterator[Output]:
        """Yield one output per batch."""
        while True:
            try:
                yield self.progress(batches)
            except StopIteration:
                return

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Run one step; raise StopIteration after the last batch."""
        if self._sparse is not None:
            return self._sparse.progress(batches)
        if self._base is not None:
            return self._base.progress(batches)
        return self._run_plain_step(next(batches))

    def detach(self) -> None:
        """Release the model for another pipeline."""
        if self._sparse is not None:
            self._sparse.detach()

    def attach(self) -> None:
        """Take the model back after `detach`."""
        if self._sparse is not None:
            self._sparse.attach(self._model.dmp)

    def _run_plain_step(self, batch: Batch) -> Output:
        optimizer, dmp = self._model.optimizers.combined, self._model.dmp
        if dmp.training:
            optimizer.zero_grad()
        loss, output = dmp(batch.to(self._model.runtime.device, non_blocking=True))
        if dmp.training:
            loss.backward()
            optimizer.step()
        result: Output = output
        return result
