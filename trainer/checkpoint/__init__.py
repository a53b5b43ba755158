"""Save and resume a run: its state, independent of the sharding plan, in a store without partial checkpoints."""

from trainer.checkpoint.manager import Checkpointer, Progress, SaveFailedError
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import CheckpointStore, FsspecStore, open_store, saved_config

__all__ = [
    "CheckpointStore",
    "Checkpointer",
    "FsspecStore",
    "Progress",
    "SaveFailedError",
    "Saver",
    "open_store",
    "saved_config",
]
