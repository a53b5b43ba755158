"""Command lines whose mistakes are told in one line, as all others are."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's, without the usage in front of an error; the parsers of its commands are like it."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"error: {message}; `{self.prog} --help` lists what is legal\n")
