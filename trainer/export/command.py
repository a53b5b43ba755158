"""The export command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.config.options import load_config
from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK


def export_main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """`export --out FOLDER [--quantize none|fp16|int8] [OPTION ...]`: the newest checkpoint of the run as a plain
    model."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer export", add_help=False, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quantize", choices=("none", "fp16", "int8"), default="none")
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"export: {error}") from None
    if found.out is None:
        raise UserError("export: --out FOLDER is missing: where the model goes")
    config = load_config(rest, environ)
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    from trainer.checkpoint import open_store
    from trainer.export.exported_model import from_checkpoint, save

    store = open_store(config.checkpoint.uri, config.train.run, config.checkpoint)
    steps = store.complete_steps()
    if not steps:
        raise UserError(
            f"run {config.train.run} has no complete checkpoint under {config.checkpoint.uri}; train it first, or name "
            f"another --train.run"
        )
    exported = from_checkpoint(store, steps[-1], found.quantize)
    save(exported, found.out)
    size = sum(f.stat().st_size for f in found.out.iterdir()) / 1024**2
    sys.stdout.write(
        f"exported step {exported.step} of run {config.train.run} to {found.out} ({size:,.1f} MiB, embeddings "
        f"{_words(found.quantize)})\n"
    )
    return EXIT_OK


def _words(quantize: str) -> str:
    return "fp32" if quantize == "none" else quantize
