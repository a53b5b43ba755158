"""Sources of samples that misbehave on purpose, given to the trainer as `odd_sources:Class`.

Each is the planted synthetic stream, with something odd at sample `data.options.at` of the split `data.options.split`.
"""

from __future__ import annotations

import urllib.request
from typing import Any

from torch import Tensor

from trainer.data import Batch, SourceContext, one_id_batch
from trainer.data.sources.synthetic import SyntheticSource

SEEN: list[str] = []  # what Scraping read from the run's own endpoint


class Odd:
    """The synthetic stream with `happen` called for the batch that holds the odd sample."""

    samples_per_epoch: int | None = None

    def __init__(self, context: SourceContext) -> None:
        tree = context.config.model_dump()
        tree["data"]["source"] = "synthetic"
        plain = type(context.config).model_validate(tree)
        self._plain = SyntheticSource(SourceContext(plain, context.split, context.device))
        self._context = context
        self._options: dict[str, Any] = context.config.data.options

    def read(self, position: int, count: int) -> Batch:
        """See Source."""
        batch = self._plain.read(position, count)
        at = int(self._options["at"]) - position
        if self._context.split == self._options.get("split", "train") and 0 <= at < count:
            ids_FB = batch.sparse.values().view(-1, count).clone()
            self.happen(ids_FB, batch.labels_B, at)
            config = self._context.config
            return one_id_batch(
                config.data.sparse_features, config.rows_per_table, batch.dense_BD, ids_FB, batch.labels_B, position
            )
        return batch

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """What is odd, in place."""
        raise NotImplementedError


class BadId(Odd):
    """An id past the end of its table."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        ids_FB[1, at] = 999


class NanLabel(Odd):
    """A label that is no number."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        labels_B[at] = float("nan")


class Crash(Odd):
    """A mistake in the program, not of the user."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        raise ZeroDivisionError("the program is wrong")


class Interrupt(Odd):
    """Ctrl-C."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        raise KeyboardInterrupt


class Scraping(Odd):
    """Reads the run's own Prometheus endpoint while it trains."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        with urllib.request.urlopen(self._options["url"], timeout=30) as answer:
            SEEN.append(answer.read().decode())


class NoSource:
    """Lacks what a source must have."""

    def __init__(self, context: SourceContext) -> None:
        """Takes what a source takes."""
