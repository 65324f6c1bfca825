"""Evaluation: how likely a model finds a text, how well it solves tasks, what sampling changes."""
