"""Save a run, keep its newest checkpoints, and resume from them on any number of processes and any sharding plan."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint.checksums import FileChecksums
from trainer.checkpoint.requests import StoreUnavailableError
from trainer.checkpoint.state import CanonicalState
from trainer.checkpoint.store import CheckpointStore, DamagedCheckpointError, open_store
from trainer.config import CheckpointConfig, TrainConfig
from trainer.errors import UserError
from trainer.sharding.sharded_model import ShardedModel
from trainer.storage.remote_errors import store_error

FORMAT = 2
Group = dist.ProcessGroup | None
_log = logging.getLogger("trainer.checkpoint")


class SaveFailedError(Exception):
    """A checkpoint could not be written; what was written of it is ignored, and older checkpoints are unchanged."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run: completed optimizer steps, and samples consumed from the stream."""

    step: int = 0
    position: int = 0


class Checkpointer:
    """Saves and restores one run. Every method is collective: all processes call it."""

    def __init__(self, model: ShardedModel, store: CheckpointStore) -> None:
        self._model = model
        self._store = store

    def newest(self) -> int | None:
        """Return the newest complete step, or None."""
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """Return the complete steps, ascending."""
        steps: list[int] = _from_rank_0(self._store.complete_steps)
        return steps

    def location(self, step: int) -> str:
        """Return the path or URI of a step, for messages."""
        return self._store.location(step)

    def state(self) -> dict[str, Any]:
        """Return the contents of a checkpoint, as views of the model where possible."""
        return CanonicalState(self._model).to_save()

    def save(self, progress: Progress) -> str:
        """Write a checkpoint now and return its location; raise SaveFailedError on every process if that fails."""
        return self.write(progress, self.state())

    def write(self, progress: Progress, state: dict[str, Any], group: Group = None) -> str:
        """Write `state` through `group` (None: the job's), mark it complete, and delete old checkpoints.

        The marker is written last, so an interruption leaves an incomplete step, which is never read.
        """
        step = progress.step
        try:
            _from_rank_0(lambda: self._store.begin(step), group)
            writer = self._store.writer(step)
            with torch.no_grad():
                dcp.save(state, storage_writer=writer, process_group=group)
            written: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(written, writer.written, group=group)
            _from_rank_0(lambda: self._store.commit(step, self._marker(progress, written)), group)
        except (CheckpointException, OSError, UserError) as error:
            _from_rank_0(lambda: self._discard(step), group)
            raise SaveFailedError(f"checkpoint {self.location(step)} cannot be written: {_cause(error)}") from None
        _from_rank_0(lambda: self._clean_up(step), group)
        return self.location(step)

    def resume(self, warn: Callable[[str], None]) -> Progress | None:
        """Load the newest readable checkpoint, or return None if there is no checkpoint.

        `warn` gets a line for each unreadable one. Raise UserError if all are unreadable, or if the checkpoint is one
        of a different run.
        """
        steps, first = self.complete_steps(), None
        for step in reversed(steps):
            try:
                return self.restore(step)
            except DamagedCheckpointError as error:
                first = first or error
                if step != steps[0]:
                    warn(f"{error}; resuming from the checkpoint before it")
        if first is None:
            return None
        others = f", nor can the {len(steps) - 1} before it" if len(steps) > 1 else ""
        raise UserError(f"{first}{others}. Fix: remove that folder and start again, or choose another --train.run NAME")

    def restore(self, step: int) -> Progress:
        """Load a complete step into the model.

        Raise UserError for a checkpoint of a different run, and DamagedCheckpointError for an unreadable one.
        """
        marker: dict[str, Any] = _from_rank_0(lambda: self._store.read_marker(step))
        check_compatible(marker, self._model.config, self.location(step))
        canonical = CanonicalState(self._model)

        def targets() -> tuple[Any, dict[str, Any]]:
            reader = self._store.reader(step, marker)
            return reader, canonical.to_load(self._saved_keys(step, reader))

        reader, state = _on_all_ranks(targets)
        try:
            dcp.load(state, storage_reader=reader)
        except (CheckpointException, OSError, RuntimeError, EOFError) as error:
            raise self._unreadable(step, error) from None
        canonical.load(state)
        progress = Progress(step=int(marker["step"]), position=int(marker["position"]))
        self._model.optimizers.set_step(progress.step)
        return progress

    def _saved_keys(self, step: int, reader: Any) -> Mapping[str, Any]:
        try:
            saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        except Exception as error:  # unpickling damaged bytes raises almost any exception
            raise self._unreadable(step, error) from None
        return saved

    def _unreadable(self, step: int, error: BaseException) -> UserError:
        text = f"checkpoint {self.location(step)} cannot be read: {_cause(error)}"
        if any(isinstance(e, StoreUnavailableError) for e in _all_of(error)):
            return UserError(f"{text}; the checkpoint may be undamaged. Fix: start again once the store responds")
        return DamagedCheckpointError(text)

    def _marker(self, progress: Progress, written: list[dict[str, FileChecksums]]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": progress.step,
            "position": progress.position,
            "world_size": self._model.runtime.world_size,
            "torch": torch.__version__,
            "config": self._model.config.model_dump(mode="json"),
            "files": {name: found.to_json() for files in written for name, found in sorted(files.items())},
        }

    def _clean_up(self, newest: int) -> None:
        """Delete all but the newest checkpoints and every keep_every_steps-th; the next save retries what fails."""
        config = self._model.config.checkpoint
        try:
            complete = self._store.complete_steps()
            kept = {newest, *complete[-config.keep :], *milestones(complete, config.keep_every_steps)}
            for step in [s for s in complete if s not in kept] + self._store.incomplete_steps():
                self._store.delete(step)
        except OSError as error:
            _log.warning("old checkpoints could not be removed (%s); the next save retries", _cause(error))

    def _discard(self, step: int) -> None:
        """Delete the files of a failed save if the store allows it; otherwise a later clean-up does."""
        try:
            self._store.begin(step)
        except OSError as error:
            _log.warning("the files of a failed save could not be removed (%s)", _cause(error))


def milestones(steps: list[int], every: int) -> set[int]:
    """Return the first of ascending `steps` at or after each multiple of `every`, which saves by time rarely hit."""
    first: dict[int, int] = {}
    for step in steps if every else []:
        if step >= every:
            first.setdefault(step // every, step)
    return set(first.values())


def check_compatible(marker: Mapping[str, Any], config: TrainConfig, location: str) -> None:
    """Raise UserError if the checkpoint belongs to a run that `config` cannot continue; name the first such field."""
    saved = _saved_config(marker, location)
    for name, was, now in _identity(saved, config):
        if was != now:
            raise UserError(
                f"checkpoint {location} was written with {name} = {was}, so it cannot be resumed: got {now}. "
                f"Fix: undo the change, or start a new run with another --train.run NAME"
            )


def load_saved_config(config: CheckpointConfig, run: str) -> TrainConfig | None:
    """Return the configuration of a run's newest undamaged checkpoint, None without one. Collective."""
    saved: TrainConfig | None = _from_rank_0(lambda: _newest_config(open_store(config.uri, run, config), config.uri))
    return saved


def _newest_config(store: CheckpointStore, uri: str) -> TrainConfig | None:
    try:
        for step in reversed(store.complete_steps()):
            try:
                return _saved_config(store.read_marker(step), store.location(step))
            except (DamagedCheckpointError, FileNotFoundError):
                continue  # damaged, or deleted meanwhile by the run's clean-up
    except UserError:
        raise
    except Exception as error:  # each store has its own exceptions
        raise store_error(error, uri, "checkpoint.uri") from None
    return None


def _saved_config(marker: Mapping[str, Any], location: str) -> TrainConfig:
    """Return the configuration in a marker; raise UserError if this version cannot read it."""
    if marker.get("format") != FORMAT:
        raise UserError(f"checkpoint {location} has an unknown format: got {marker.get('format')}; allowed: {FORMAT}")
    try:
        return TrainConfig.model_validate(marker["config"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"checkpoint {location} has a configuration that this version cannot read: {_cause(error)}"
        ) from None


def _identity(saved: TrainConfig, config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Return (field, saved, current) of what must not change in a run: names and shapes of state, order of data."""
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


def _from_rank_0(operation: Callable[[], Any], group: Group = None) -> Any:
    """Run an operation on rank 0, and return its result or raise its error on every process."""
    answer: list[Any] = [None, None, ""]
    if dist.get_rank() == 0:
        answer = _run(operation)
    dist.broadcast_object_list(answer, src=0, group=group)
    return _unpack(answer)


def _on_all_ranks(operation: Callable[[], Any]) -> Any:
    """Run an operation on every process and return its result; if any fails, raise the first error on every process."""
    mine = _run(operation)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine[1:])
    failed = next((e for e in errors if e[0] is not None), None)
    return _unpack([mine[0], *failed] if failed else mine)


def _run(operation: Callable[[], Any]) -> list[Any]:
    """Return [result, None, ""] or [None, class of the error, text], since an exception may not be picklable."""
    try:
        return [operation(), None, ""]
    except UserError as error:
        return [None, type(error), str(error)]
    except OSError as error:
        return [None, UserError, f"checkpoint.uri: {_cause(error)}"]


def _unpack(answer: list[Any]) -> Any:
    result, error_class, text = answer
    if error_class is not None:
        raise error_class(text)
    return result


def _all_of(error: BaseException) -> list[BaseException]:
    """Return the error, or the errors of all ranks if DCP wrapped them in one."""
    return [f[0] for f in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def _cause(error: BaseException) -> str:
    """Return the cause of an error as one line; DCP wraps the causes of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(failure[0])}"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}. Fix: free some space, lower --checkpoint.keep, or choose another --checkpoint.uri"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
