"""`python -m unspool` is `unspool`."""

from __future__ import annotations

import sys

from unspool.cli import main

sys.exit(main())
