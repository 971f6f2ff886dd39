"""`python -m compress`, and so `torchrun -m compress`."""

import sys

from compress.cli import main

if __name__ == "__main__":
    sys.exit(main())
