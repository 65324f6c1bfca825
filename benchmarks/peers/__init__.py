"""Drivers of other engines; `driver.py` is run by each engine's own Python, which does not have unspool."""
