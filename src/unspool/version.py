"""The one place that says which version this is; pyproject.toml reads it from here."""

VERSION = "0.1.0"
