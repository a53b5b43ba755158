"""The export command: write a checkpoint as a single-process model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.config.options import load_config
from trainer.errors import UserError
from trainer.exit_codes import EXIT_OK


def export_main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Run `export --out FOLDER [--quantize none|fp16|int8] [OPTION ...]` on the run's newest checkpoint."""
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
        raise UserError("export: --out is missing. Fix: --out FOLDER, the folder for the model")
    config = load_config(rest, environ)
    from trainer.runtime.quiet import quiet_libraries

    quiet_libraries()
    from trainer.checkpoint import open_store
    from trainer.export.exported_model import from_checkpoint, save

    store = open_store(config.checkpoint.uri, config.train.run, config.checkpoint)
    steps = store.complete_steps()
    if not steps:
        raise UserError(
            f"run {config.train.run} has no complete checkpoint in {config.checkpoint.uri}. Fix: train it first, or "
            f"choose another --train.run"
        )
    exported = from_checkpoint(store, steps[-1], found.quantize)
    save(exported, found.out)
    size = sum(f.stat().st_size for f in found.out.iterdir()) / 1024**2
    precision = "fp32" if found.quantize == "none" else found.quantize
    sys.stdout.write(
        f"exported step {exported.step} of run {config.train.run} to {found.out} ({size:,.1f} MiB, embeddings "
        f"{precision})\n"
    )
    return EXIT_OK
