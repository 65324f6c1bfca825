"""lm-eval's own command line with this engine among its models:

    python -m unspool.evaluation.lm_eval_cli run --model unspool --model_args model=smollm2 --tasks arc_easy …

lm-eval finds models by itself where it loads entry points of the group `lm_eval.models`; until it does, this does.
"""

from __future__ import annotations

import sys


def register() -> None:
    """Make the entry points of `lm_eval.models` known to lm-eval."""
    from importlib.metadata import entry_points

    import lm_eval.models  # noqa: F401  # its own, which it would not look for once there is one
    from lm_eval.api.registry import model_registry

    for entry in entry_points(group="lm_eval.models"):
        if entry.name not in model_registry:
            model_registry.register(entry.name, target=entry)


def main() -> int:
    from unspool.evaluation.harness_run import check_installed

    check_installed()
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
