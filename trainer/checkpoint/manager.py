"""Saves a run, keeps the newest checkpoints, and resumes from them on any number of processes and any plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.state import CanonicalState
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.job import Job

FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, and samples of the stream consumed."""

    step: int = 0
    position: int = 0


class Checkpointer:
    """Collective: every method is called by all processes."""

    def __init__(self, job: Job, store: CheckpointStore) -> None:
        self._job = job
        self._store = store

    def newest(self) -> int | None:
        """The newest complete step, or None."""
        newest: int | None = _from_rank_0(lambda: max(self._store.complete_steps(), default=None))
        return newest

    def location(self, step: int) -> str:
        """Path or URI of a step, for people."""
        return self._store.location(step)

    def save(self, progress: Progress) -> str:
        """Write a checkpoint, mark it complete, drop the ones that are no longer kept. Returns its location."""
        state = CanonicalState(self._job).to_save()
        try:
            with torch.no_grad():
                dcp.save(state, storage_writer=self._store.writer(progress.step))
        except (CheckpointException, OSError) as error:
            raise UserError(
                f"checkpoint {self.location(progress.step)} cannot be written: {_cause(error)}; the checkpoints before "
                f"it are untouched"
            ) from None
        if self._job.runtime.is_main:
            self._store.commit(progress.step, self._marker(progress))
            self._clean_up(progress.step)
        dist.barrier()
        return self.location(progress.step)

    def restore(self, step: int) -> Progress:
        """Load a complete step into the job; raises UserError for a checkpoint of another model or one that is
        unreadable."""
        marker: dict[str, Any] = _from_rank_0(lambda: self._store.read_marker(step))
        check_compatible(marker, self._job.config, self.location(step))
        canonical = CanonicalState(self._job)
        reader = self._store.reader(step)
        try:
            saved = reader.read_metadata().state_dict_metadata
        except Exception as error:  # a pickle: damaged bytes raise almost anything
            raise self._unreadable(step, error) from None
        state = canonical.to_load(saved)
        missing = sorted(set(state) - set(saved))
        if missing:
            raise UserError(f"checkpoint {self.location(step)} lacks {missing[0]} (and {len(missing) - 1} more)")
        try:
            dcp.load(state, storage_reader=reader)
        except (CheckpointException, OSError, RuntimeError, EOFError) as error:
            raise self._unreadable(step, error) from None
        canonical.loaded(state)
        progress = Progress(step=int(marker["step"]), position=int(marker["position"]))
        self._job.optimizers.set_step(progress.step)
        return progress

    def _unreadable(self, step: int, error: BaseException) -> UserError:
        return UserError(
            f"checkpoint {self.location(step)} cannot be read: {_cause(error)}; remove that folder to resume "
            f"from the one before it, or start afresh with --train.run NAME"
        )

    def _marker(self, progress: Progress) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": progress.step,
            "position": progress.position,
            "world_size": self._job.runtime.world_size,
            "torch": torch.__version__,
            "config": self._job.config.model_dump(mode="json"),
        }

    def _clean_up(self, newest: int) -> None:
        kept = set(self._store.complete_steps()[-self._job.config.checkpoint.keep :]) | {newest}
        for step in self._store.complete_steps():
            if step not in kept:
                self._store.delete(step)
        for step in self._store.incomplete_steps():
            self._store.delete(step)


def check_compatible(marker: Mapping[str, Any], config: TrainConfig, location: str) -> None:
    """Raises UserError naming the first field in which the checkpoint's run differs from `config` in a way that
    matters."""
    if marker.get("format") != FORMAT:
        raise UserError(f"checkpoint {location} has format {marker.get('format')}; this version reads format {FORMAT}")
    try:
        saved = TrainConfig.model_validate(marker["config"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"checkpoint {location} holds a configuration that this version cannot read: {_cause(error)}"
        ) from None
    for name, was, now in _identity(saved, config):
        if was != now:
            raise UserError(
                f"checkpoint {location} was made with {name} = {was}, now it is {now}: such a run cannot go on; "
                f"undo the change, or start afresh with another --train.run NAME"
            )


def _identity(saved: TrainConfig, config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """What must not change in a run: names and shapes of its state, and the order of its data."""
    pairs: list[tuple[str, Any, Any]] = [
        (f"model.{name}", getattr(saved.model, name), getattr(config.model, name))
        for name in type(saved.model).model_fields
        if name not in ("num_embeddings", "num_embeddings_cap")
    ]
    pairs += [
        ("data.sparse_features", saved.data.sparse_features, config.data.sparse_features),
        ("data.dense_features", saved.data.dense_features, config.data.dense_features),
        ("model.num_embeddings (rows per table)", saved.rows_per_table, config.rows_per_table),
        ("optim.sparse.optimizer", saved.optim.sparse.optimizer, config.optim.sparse.optimizer),
        ("optim.dense.optimizer", saved.optim.dense.optimizer, config.optim.dense.optimizer),
        ("data.source", saved.data.source, config.data.source),
        ("data.seed", saved.data.seed, config.data.seed),
        ("data.shuffle", saved.data.shuffle, config.data.shuffle),
        ("data.ids_per_feature", saved.data.ids_per_feature, config.data.ids_per_feature),
        ("data.criteo", saved.data.criteo, config.data.criteo),
        ("data.parquet.label", saved.data.parquet.label, config.data.parquet.label),
        ("data.parquet.dense", saved.data.parquet.dense, config.data.parquet.dense),
        ("data.parquet.sparse", saved.data.parquet.sparse, config.data.parquet.sparse),
    ]
    return pairs


def _from_rank_0(ask: Any) -> Any:
    """What `ask` returns or the UserError it raises on rank 0, on every process."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = ask()
        except UserError as error:
            answer[1] = str(error)
        except OSError as error:
            answer[1] = f"checkpoint.uri cannot be read: {_cause(error)}"
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(answer[1])
    return answer[0]


def _cause(error: BaseException) -> str:
    """The first line of what is behind an error; DCP wraps the causes of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(failure[0])}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
