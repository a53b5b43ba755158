"""Where the files of a run are: `<root>/<run>`, with its checkpoints in `<root>/<run>/checkpoints`.

A root is a path or a URI, such as `checkpoint.uri` or `metrics.dir`.
"""

from __future__ import annotations

_CHECKPOINTS = "checkpoints"


def run_uri(root: str, run: str) -> str:
    """Return the folder of a run."""
    return f"{root.rstrip('/')}/{run}"


def checkpoints_uri(root: str, run: str) -> str:
    """Return the folder with the checkpoints of a run."""
    return f"{run_uri(root, run)}/{_CHECKPOINTS}"


def root_of_checkpoints(folder: str, run: str) -> str:
    """Return the root for which `checkpoints_uri(root, run)` is `folder`, or `folder` itself if there is none."""
    return folder.rstrip("/").removesuffix(f"/{run}/{_CHECKPOINTS}")
