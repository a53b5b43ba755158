"""What a backend knows of a stack: its resources, and whether an update is running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pulumi import automation

_FILE = "file://"
#: The last updates among which a `destroy` is looked for.
_NUM_UPDATES = 20


@dataclass(frozen=True)
class State:
    """A stack's state; `was_deployed` is false for a stack that is new to this backend, or absent from it.

    `is_updating` is true while an update is running, and after one that was interrupted.
    """

    backend: str
    resources: Sequence[Mapping[str, Any]] = ()
    was_deployed: bool = False
    is_updating: bool = False


def read_state(stack: automation.Stack | None, workspace: automation.LocalWorkspace, project: str) -> State:
    """Return what the backend knows of a stack, None for one that does not exist in it."""
    backend = workspace.who_am_i().url or "unknown"
    if stack is None:
        return State(backend)
    deployment = stack.export_stack().deployment or {}
    resources = custom_resources(deployment)
    updates = stack.history(page_size=_NUM_UPDATES, show_secrets=False)
    # An empty state that was never destroyed is one of a stack that is new to this backend.
    was_destroyed = any(update.kind == "destroy" and update.result == "succeeded" for update in updates)
    # Pulumi Cloud lists the running update.
    is_running = bool(updates) and updates[0].result == "in-progress"
    is_pending = bool(deployment.get("pending_operations"))
    return State(
        backend,
        resources,
        was_deployed=bool(resources) or was_destroyed,
        is_updating=is_running or is_pending or _is_locked(stack.name, backend, project),
    )


def custom_resources(deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a state's resources without the stack itself, components and providers."""
    found = deployment.get("resources") or []
    return [item for item in found if item.get("custom") and not item["type"].startswith("pulumi:providers:")]


def _is_locked(stack: str, backend: str, project: str) -> bool:
    """Return whether a folder with states has a lock of the stack; no command shows those of a bucket.

    https://github.com/pulumi/pulumi/blob/master/pkg/backend/diy/lock.go
    """
    if not backend.startswith(_FILE):
        return False
    root = Path(backend.removeprefix(_FILE)).expanduser() / ".pulumi/locks"
    folders = (root / "organization" / project / stack, root / stack)
    return any(any(folder.glob("*.json")) for folder in folders)
