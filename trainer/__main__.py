"""Run the command line as `python -m trainer`."""

import sys

from trainer.main import console

if __name__ == "__main__":
    sys.exit(console())
