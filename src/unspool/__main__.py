"""`python -m unspool` is `unspool`."""

from __future__ import annotations

import os
import sys

# Python puts the current directory first for `-m`. What lies there is data, never a module for a later import to find.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from unspool.cli import main

sys.exit(main())
