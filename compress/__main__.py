"""`python -m compress`, and so `torchrun -m compress`."""

from compress.cli import main

if __name__ == "__main__":
    main()
