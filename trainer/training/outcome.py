"""How a run can end."""

from __future__ import annotations

from enum import Enum

from trainer.config import TrainConfig


class Outcome(Enum):
    """How a run ended; the value is the text in the result event's field `state`."""

    COMPLETE = "complete"
    REACHED_TARGET = "complete: reached train.target_auc {target_auc}"
    ALREADY_COMPLETE = "was already complete: nothing to train (more --train.steps, or another --train.run NAME)"
    ALREADY_AT_TARGET = "had already reached train.target_auc: nothing to train"
    PREEMPTED = "preempted"

    def describe(self, config: TrainConfig) -> str:
        """Return the text for the user."""
        return self.value.format(target_auc=config.train.target_auc)
