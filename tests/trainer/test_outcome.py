"""The outcomes of a run and the text of each in the result event."""

from __future__ import annotations

from small_jobs import tiny

from trainer.training.outcome import Outcome


def test_every_outcome_keeps_its_text_in_the_result_event() -> None:
    config = tiny({"train.target_auc": 0.7})
    assert {outcome.name: outcome.describe(config) for outcome in Outcome} == {
        "COMPLETE": "complete",
        "REACHED_TARGET": "complete: reached train.target_auc 0.7",
        "ALREADY_COMPLETE": (
            "was already complete: nothing to train (more --train.steps, or another --train.run NAME)"
        ),
        "ALREADY_AT_TARGET": "had already reached train.target_auc: nothing to train",
        "PREEMPTED": "preempted",
    }
