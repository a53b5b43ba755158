"""`python -m trainer`: hand the command line over."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
