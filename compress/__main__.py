"""`python -m compress`, and so `torchrun -m compress`."""

import os
import sys

from compress.cli import main

if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from compress.core.processes import end_process

        end_process(code)
    sys.exit(code)
