"""Saving and resuming a run: a canonical form of its state that no sharding plan changes, in a store that is never
half-written."""

from trainer.checkpoint.manager import Checkpointer, Progress, SaveFailedError
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import CheckpointStore, FsspecStore, open_store

__all__ = [
    "CheckpointStore",
    "Checkpointer",
    "FsspecStore",
    "Progress",
    "SaveFailedError",
    "Saver",
    "open_store",
]
