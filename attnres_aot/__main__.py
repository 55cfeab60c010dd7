"""Runs the command line as `python -m attnres_aot`."""

import sys

from attnres_aot.cli.entry import main

if __name__ == "__main__":  # build workers that are spawned import this module again
    sys.exit(main())
