"""Runs that several files of tests use, and readable reports of failures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_telemetry() -> None:
    """torch and TorchRec log every call with its arguments for collectors that we do not have: screens of text."""
    for name in list(logging.root.manager.loggerDict):
        if "NullHandler" in name:
            logging.getLogger(name).disabled = True


@pytest.fixture(scope="session")
def from_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run saved by one process under a column-wise plan, with what it held."""
    from small_jobs import PLANS, config_of, trained

    folder = tmp_path_factory.mktemp("one")
    return folder, trained(config_of(folder, PLANS["column_wise"]))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, from_one: tuple[Path, dict[str, Any]]) -> tuple[Path, Path]:
    """Results of workers/checkpoint.py on two processes, and the folder of the checkpoints that they wrote."""
    from small_jobs import run_workers

    folder = tmp_path_factory.mktemp("pair")
    made = folder / "made"
    return run_workers("checkpoint", 2, folder, "all", str(from_one[0]), str(made)), made
