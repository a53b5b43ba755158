"""Sources of samples with injected faults, which the trainer opens as `odd_sources:Class`.

Each is the synthetic stream with a fault at sample `data.options.at` of the split `data.options.split`.
"""

from __future__ import annotations

import urllib.request
from typing import Any

from torch import Tensor

from trainer.data import Batch, SourceContext, one_id_batch
from trainer.data.sources.synthetic import SyntheticSource

SEEN: list[str] = []  # what Scraping read from the run's endpoint


class Odd:
    """The synthetic stream; it calls `happen` for the batch with the chosen sample."""

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
        """Inject the fault into the batch, in place."""
        raise NotImplementedError


class BadId(Odd):
    """An id past the end of its table."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        ids_FB[1, at] = 999


class NanLabel(Odd):
    """A label that is NaN."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        labels_B[at] = float("nan")


class Crash(Odd):
    """A bug in the program, not a mistake of the user."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        raise ZeroDivisionError("the program is wrong")


class Interrupt(Odd):
    """Ctrl-C."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        raise KeyboardInterrupt


class Scraping(Odd):
    """A source that reads the run's Prometheus endpoint during training."""

    def happen(self, ids_FB: Tensor, labels_B: Tensor, at: int) -> None:
        """See Odd."""
        with urllib.request.urlopen(self._options["url"], timeout=30) as answer:
            SEEN.append(answer.read().decode())


class NoSource:
    """A class that does not implement the protocol of a source."""

    def __init__(self, context: SourceContext) -> None:
        """Accept the argument of a source."""
