"""TorchX's command line with the scheduler of this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from infra.kube_api import KubeApiError
from trainer.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR
from workloads.errors import UserError
from workloads.torchx_adapter import SCHEDULER


def register() -> None:
    """Add the scheduler to TorchX's own.

    An entry point would replace them: TorchX ignores its own schedulers if any package has one in `torchx.schedulers`.
    """
    from torchx import schedulers

    modules: Any = schedulers.DEFAULT_SCHEDULER_MODULES
    modules[SCHEDULER] = "workloads.torchx_adapter.scheduler"


def main(arguments: Sequence[str]) -> int:
    """Run TorchX's command line; a mistake ends it with one line and exit code 2."""
    try:
        from torchx.cli.main import main as torchx_main
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: the Python package {error.name!r} is missing. Fix: uv pip install torchx==0.7.0\n")
        return EXIT_USER_ERROR
    register()
    try:
        torchx_main(list(arguments))
    except (UserError, KubeApiError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK
