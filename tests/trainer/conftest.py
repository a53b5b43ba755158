"""Runs that several files of tests use, and readable reports of failures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_telemetry() -> None:
    """Disable loggers of torch and TorchRec that record every call with its arguments for collectors not in use."""
    for name in list(logging.root.manager.loggerDict):
        if "NullHandler" in name:
            logging.getLogger(name).disabled = True


@pytest.fixture(scope="session", autouse=True)
def _fast_starts(forked_trainers: None) -> None:
    """Fork the trainer in all tests of this folder but those inside `fork_server.real_processes()`."""


@pytest.fixture(scope="session")
def from_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Save a run from one process under a column-wise plan, and return its folder, weights and losses."""
    from small_jobs import PLANS, config_of, trained

    folder = tmp_path_factory.mktemp("one")
    return folder, trained(config_of(folder, PLANS["column_wise"]))


@pytest.fixture(scope="session")
def pair(
    _fast_starts: None, tmp_path_factory: pytest.TempPathFactory, from_one: tuple[Path, dict[str, Any]]
) -> tuple[Path, Path]:
    """Return the results of workers/checkpoint.py on two processes, and the folder of their checkpoints."""
    from small_jobs import run_workers

    folder = tmp_path_factory.mktemp("pair")
    saved = folder / "saved"
    return run_workers("checkpoint", 2, folder, "all", str(from_one[0]), str(saved)), saved
