"""Drivers of engines for `unspool bench cpu`; `driver.py` is run by each engine's own Python, which lacks unspool."""
