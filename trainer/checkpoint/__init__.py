"""Save and resume a run: its state, independent of the sharding plan, in a store without partial checkpoints."""

from trainer.checkpoint.manager import Checkpointer, Progress, SaveFailedError, load_saved_config
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import CheckpointStore, FsspecStore, open_store

__all__ = [
    "CheckpointStore",
    "Checkpointer",
    "FsspecStore",
    "Progress",
    "SaveFailedError",
    "Saver",
    "load_saved_config",
    "open_store",
]
