"""Open the source that `data.source` names."""

from __future__ import annotations

import importlib

from trainer.data.base import Source, SourceContext
from trainer.errors import UserError


def open_source(context: SourceContext) -> Source:
    """Return the source that `data.source` names; raise UserError if it cannot be opened."""
    name = context.config.data.source
    if name == "synthetic":
        from trainer.data.sources.synthetic import SyntheticSource

        return SyntheticSource(context)
    if name == "criteo":
        from trainer.data.sources.criteo import CriteoSource

        return CriteoSource(context)
    if name == "parquet":
        from trainer.data.sources.parquet import ParquetSource

        return ParquetSource(context)
    return _open_custom(name, context)


def _open_custom(name: str, context: SourceContext) -> Source:
    """Return an object of the user's class `package.module:Class`."""
    module_name, _, class_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise UserError(
            f"data.source {name}: cannot import {module_name} ({error}). Fix: add its folder to PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise UserError(f"data.source {name}: module {module_name} has no {class_name}") from error
    source = factory(context)
    if not isinstance(source, Source):
        raise UserError(
            f"data.source {name}: the object lacks read() or samples_per_epoch. "
            f"Fix: implement the protocol trainer.data.Source"
        )
    return source
