"""`python -m safeload` is the program `safeload`."""

import sys

from safeload.cli import main

if __name__ == "__main__":
    sys.exit(main())
