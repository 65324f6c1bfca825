"""Comparisons with other engines and with other versions of unspool; run from a clone, not part of the package."""
