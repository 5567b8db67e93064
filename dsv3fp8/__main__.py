"""`python -m dsv3fp8 COMMAND [key=value …]`, also installed as the console script `dsv3fp8`."""

import sys

from dsv3fp8.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
