"""An argument parser whose errors fit on one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from infra.exit_codes import USER_ERROR


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints an error without the usage; its subparsers have the same class."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit as for any other invalid input."""
        self.exit(USER_ERROR, f"error: {message}; `{self.prog} --help` lists the options\n")
