"""How a client's checks are run, inside that client's own environment: no dependencies, nothing of unspool.

A file of checks has functions that `check` marks and ends with `run(PACKAGE)`. It is called with the server's address
and a model's name, and prints one JSON object: the package's version, and each check with its error.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

URL, MODEL = sys.argv[1:3] if len(sys.argv) > 2 else ("", "")
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def raises(kind: type[BaseException], function: Callable[[], object], *words: str) -> BaseException:
    """The error that a function raises; AssertionError where it raises none, or one without these words."""
    try:
        function()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} is not in {error}") from error
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def run(package: str) -> None:
    results = []
    for function in CHECKS:
        error = None
        try:
            function()
        except Exception as caught:
            place = traceback.extract_tb(caught.__traceback__)[-1]
            own = [frame for frame in traceback.extract_tb(caught.__traceback__) if "client_" in frame.filename]
            place = own[-1] if own else place
            error = f"{type(caught).__name__} at line {place.lineno}: {str(caught)[:300]}"
        results.append({"name": function.__name__.replace("_", " ").strip(), "error": error})
    print(json.dumps({"version": version(package), "checks": results}))
