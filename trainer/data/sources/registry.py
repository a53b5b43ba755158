"""From the name in `data.source` to an open source."""

from __future__ import annotations

import importlib

from trainer.data.base import Source, SourceContext
from trainer.errors import UserError


def open_source(context: SourceContext) -> Source:
    """The source that `data.source` names; raises UserError with what is legal for one that cannot be opened."""
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
    return _custom(name, context)


def _custom(name: str, context: SourceContext) -> Source:
    module_name, _, class_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise UserError(
            f"data.source is {name}: cannot import {module_name} ({error}); put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise UserError(f"data.source is {name}: module {module_name} has no {class_name}") from error
    source = factory(context)
    if not isinstance(source, Source):
        raise UserError(
            f"data.source is {name}: its object lacks read() or samples_per_epoch; "
            f"see trainer.data.Source for what it must have"
        )
    return source
