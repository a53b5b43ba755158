"""The interface of a sink, a place that a run's events go to."""

from __future__ import annotations

from typing import Any


class Sink:
    """A place that events go to. The methods do nothing here; a sink overrides those that it needs."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Handle one event: start, plan, resume, train, eval, checkpoint, result."""

    def set_step(self, step: int) -> None:
        """Show that `step` steps are done; called after every step, so it must be cheap."""

    def close(self) -> None:
        """Flush and release the sink's resources."""
