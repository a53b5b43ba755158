"""Saves a run, keeps the newest checkpoints, and resumes from them on any number of processes and any plan."""

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
from trainer.checkpoint.store import CheckpointStore, DamagedCheckpointError
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.sharding.sharded_model import ShardedModel

FORMAT = 2
Group = dist.ProcessGroup | None
_log = logging.getLogger("trainer.checkpoint")


class SaveFailedError(Exception):
    """A checkpoint could not be written; nothing of it counts, and the ones before it are untouched."""


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps done, and samples of the stream consumed."""

    step: int = 0
    position: int = 0


class Checkpointer:
    """Collective: every method is called by all processes."""

    def __init__(self, job: ShardedModel, store: CheckpointStore) -> None:
        self._job = job
        self._store = store

    def newest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """Steps that are complete, ascending."""
        steps: list[int] = _from_rank_0(self._store.complete_steps)
        return steps

    def location(self, step: int) -> str:
        """Path or URI of a step, for people."""
        return self._store.location(step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as views of the model where possible."""
        return CanonicalState(self._job).to_save()

    def save(self, progress: Progress) -> str:
        """Write a checkpoint now; returns its location. Raises SaveFailedError on every process."""
        return self.write(progress, self.state())

    def write(self, progress: Progress, state: dict[str, Any], group: Group = None) -> str:
        """Write `state` through `group` (none: the job's), mark it complete, drop the ones that are no longer kept.

        The marker comes last, so whatever ends this early leaves an incomplete step, which nobody reads.
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
        """Load the newest checkpoint that can be read; None where there is none. `warn` gets a line for each that
        cannot. Raises UserError where none of several can, or the run was another one."""
        steps, first = self.complete_steps(), None
        for step in reversed(steps):
            try:
                return self.restore(step)
            except DamagedCheckpointError as error:
                first = first or error
                if step != steps[0]:
                    warn(f"{error}; going on from the checkpoint before it")
        if first is None:
            return None
        others = f", nor can the {len(steps) - 1} before it" if len(steps) > 1 else ""
        raise UserError(f"{first}{others}; remove that folder and start afresh, or name another --train.run NAME")

    def restore(self, step: int) -> Progress:
        """Load a complete step into the job; raises UserError for a checkpoint of another run, and
        DamagedCheckpointError for one that is unreadable."""
        marker: dict[str, Any] = _from_rank_0(lambda: self._store.read_marker(step))
        check_compatible(marker, self._job.config, self.location(step))
        canonical = CanonicalState(self._job)

        def targets() -> tuple[Any, dict[str, Any]]:
            reader = self._store.reader(step, marker)
            return reader, canonical.to_load(self._saved_keys(step, reader))

        reader, state = _together(targets)
        try:
            dcp.load(state, storage_reader=reader)
        except (CheckpointException, OSError, RuntimeError, EOFError) as error:
            raise self._unreadable(step, error) from None
        canonical.loaded(state)
        progress = Progress(step=int(marker["step"]), position=int(marker["position"]))
        self._job.optimizers.set_step(progress.step)
        return progress

    def _saved_keys(self, step: int, reader: Any) -> Mapping[str, Any]:
        try:
            saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        except Exception as error:  # a pickle: damaged bytes raise almost anything
            raise self._unreadable(step, error) from None
        return saved

    def _unreadable(self, step: int, error: BaseException) -> UserError:
        text = f"checkpoint {self.location(step)} cannot be read: {_cause(error)}"
        if any(isinstance(e, StoreUnavailableError) for e in _all_of(error)):
            return UserError(f"{text}; the checkpoint may be whole: start again once the store answers")
        return DamagedCheckpointError(text)

    def _marker(self, progress: Progress, written: list[dict[str, FileChecksums]]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": progress.step,
            "position": progress.position,
            "world_size": self._job.runtime.world_size,
            "torch": torch.__version__,
            "config": self._job.config.model_dump(mode="json"),
            "files": {name: found.to_json() for files in written for name, found in sorted(files.items())},
        }

    def _clean_up(self, newest: int) -> None:
        """Keep the newest ones and every keep_every_steps-th. Trouble here must not fail a save that is complete."""
        config = self._job.config.checkpoint
        try:
            complete = self._store.complete_steps()
            kept = {newest, *complete[-config.keep :], *milestones(complete, config.keep_every_steps)}
            for step in [s for s in complete if s not in kept] + self._store.incomplete_steps():
                self._store.delete(step)
        except OSError as error:
            _log.warning("old checkpoints could not be removed (%s); the next save tries again", _cause(error))

    def _discard(self, step: int) -> None:
        """Give back what a failed save took, where the store still lets us; a later clean-up comes by again."""
        try:
            self._store.begin(step)
        except OSError as error:
            _log.warning("what a failed save left could not be removed (%s)", _cause(error))


def milestones(steps: list[int], every: int) -> set[int]:
    """Of ascending `steps` the first at or after each multiple of `every`, since saves by the clock hit none."""
    first: dict[int, int] = {}
    for step in steps if every else []:
        if step >= every:
            first.setdefault(step // every, step)
    return set(first.values())


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


def _from_rank_0(ask: Callable[[], Any], group: Group = None) -> Any:
    """What `ask` returns or the error it raises on rank 0, on every process."""
    answer: list[Any] = [None, None, ""]
    if dist.get_rank() == 0:
        answer = _attempt(ask)
    dist.broadcast_object_list(answer, src=0, group=group)
    return _answer(answer)


def _together(ask: Callable[[], Any]) -> Any:
    """What `ask` returns on this process, or on every process the error of the first one that raises."""
    mine = _attempt(ask)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine[1:])
    failed = next((e for e in errors if e[0] is not None), None)
    return _answer([mine[0], *failed] if failed else mine)


def _attempt(ask: Callable[[], Any]) -> list[Any]:
    """[result, None, ""] or [None, kind of error, text]: exceptions themselves may not survive pickling."""
    try:
        return [ask(), None, ""]
    except UserError as error:
        return [None, type(error), str(error)]
    except OSError as error:
        return [None, UserError, f"checkpoint.uri: {_cause(error)}"]


def _answer(answer: list[Any]) -> Any:
    result, kind, text = answer
    if kind is not None:
        raise kind(text)
    return result


def _all_of(error: BaseException) -> list[BaseException]:
    """An error, or those of all ranks that DCP wrapped in one."""
    return [f[0] for f in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def _cause(error: BaseException) -> str:
    """The first line of what is behind an error; DCP wraps the causes of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        return f"rank {rank}: {_cause(failure[0])}"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}; free some, lower --checkpoint.keep, or choose another --checkpoint.uri"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
