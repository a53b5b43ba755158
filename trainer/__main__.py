"""`python -m trainer`: hand the command line over."""

import sys

from trainer.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
