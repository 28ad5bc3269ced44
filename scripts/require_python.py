"""Stop a set-up early, in plain words, on a Python that is too old for the project."""

import sys

if sys.version_info < (3, 11):
    found = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(f"error: Python {found} found, 3.11 or newer needed; run `make PYTHON=python3.12 ...`")
