"""Help texts, built from the same descriptions as the JSON Schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from trainer.config import TrainConfig, leaves
from trainer.config.options import env_name, option_name

_WITH_OPTIONS = ("train", "evaluate", "config", "export", "bench", "plan")


def overview(commands: Mapping[str, Callable[..., Any]]) -> str:
    """Return the text of `python -m trainer --help`."""
    width = max(map(len, commands))
    summaries = {name: (function.__doc__ or "").strip().partition("\n")[0] for name, function in commands.items()}
    lines = [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
    return "\n".join(
        [
            "usage: python -m trainer [COMMAND] [--config FILE] [--section.option VALUE ...]",
            "",
            "Train a sharded deep learning recommendation model (DLRM or DCNv2) with TorchRec, on CPUs or GPUs.",
            "",
            "commands (train is the default):",
            *lines,
            "",
            "`python -m trainer COMMAND --help` lists a command's options. They come from defaults, a JSON, TOML or",
            f"YAML file, the environment ({env_name(('train', 'batch_size'))}) and the command line; the last wins.",
        ]
    )


def command_help(name: str, summary: str) -> str:
    """Return the text of `python -m trainer COMMAND --help`."""
    lines = [f"usage: python -m trainer {name} ...", "", inspect.cleandoc(summary)]
    if name == "plan":
        from trainer.planning.options import options_parser

        own = options_parser().format_help().partition("\noptions:\n")[2].rstrip()
        lines += ["", own, "", "Without --gpus-per-node it measures this machine's CPUs for a few seconds."]
    if name == "bench":
        from trainer.bench.options import options_parser as bench_parser

        lines += ["", bench_parser().format_help().partition("\noptions:\n")[2].rstrip()]
    if name in _WITH_OPTIONS:
        lines += ["", "  --config FILE", "        read options from a .json, .toml, .yaml or .yml file"]
        section = None
        for path, field in leaves().items():
            if path[0] != section:
                section = path[0]
                lines += ["", f"{section}: {TrainConfig.model_fields[section].description}"]
            lines += [
                f"  --{option_name(path)} {_kind(field.annotation)}",
                f"        {field.description} [{_default(field)}]",
            ]
    return "\n".join(lines)


def _default(field: Any) -> str:
    """Return how the help shows a default."""
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    if value is None:
        return "none"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _kind(annotation: Any) -> str:
    """Return how the help shows a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (int, float, str, bool):
        return {int: "N", float: "X", str: "TEXT", bool: "true|false"}[annotation]
    if origin is None:
        return "JSON"
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (tuple, dict):
        return "LIST" if origin is tuple else "JSON"
    return "|".join(dict.fromkeys(_kind(a) for a in arguments if a is not type(None)))
