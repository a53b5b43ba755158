"""One step of training or evaluation, overlapped by TorchRec's pipelines or plain."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from trainer.data import Batch
from trainer.sharding.sharded_model import ShardedModel

Output = tuple[Tensor, Tensor, Tensor, Tensor | None]  # loss (), logits (B), labels (B), weights (B) or None


class Pipeline:
    """Runs a job's model over batches. In training mode each step also goes backward and updates the weights.

    A pipeline reads up to two batches ahead of the step that it returns. `detach` gives the model back, so that another
    pipeline may use it; `attach` goes on with the batches that were ahead.
    """

    def __init__(self, job: ShardedModel) -> None:
        self._job = job
        kind = job.config.train.pipeline
        self._sparse: TrainPipelineSparseDist[Batch, Output] | None = None
        self._base: TrainPipelineBase[Batch, Output] | None = None
        if kind == "sparse_dist":
            self._sparse = TrainPipelineSparseDist(
                job.dmp, job.optimizers.combined, job.runtime.device, execute_all_batches=True
            )
        elif kind == "base":
            self._base = TrainPipelineBase(job.dmp, job.optimizers.combined, job.runtime.device)

    def run(self, batches: Iterator[Batch]) -> Iterator[Output]:
        """One output per batch, until there are no more."""
        while True:
            try:
                yield self.progress(batches)
            except StopIteration:
                return

    def progress(self, batches: Iterator[Batch]) -> Output:
        """One step; raises StopIteration once all batches are through."""
        if self._sparse is not None:
            return self._sparse.progress(batches)
        if self._base is not None:
            return self._base.progress(batches)
        return self._plain(next(batches))

    def detach(self) -> None:
        """Give the model back."""
        if self._sparse is not None:
            self._sparse.detach()

    def attach(self) -> None:
        """Take the model again after `detach`."""
        if self._sparse is not None:
            self._sparse.attach(self._job.dmp)

    def _plain(self, batch: Batch) -> Output:
        optimizer = self._job.optimizers.combined
        if self._job.dmp.training:
            optimizer.zero_grad()
        loss, output = self._job.dmp(batch.to(self._job.runtime.device, non_blocking=True))
        if self._job.dmp.training:
            loss.backward()
            optimizer.step()
        result: Output = output
        return result
