"""What can be wrong with a model directory. All of it is the operator's to mend, so messages carry a remedy."""

from __future__ import annotations


class ModelError(Exception):
    """Base: this model cannot be served as it is."""


class UnsupportedConfig(ModelError):
    """A field of `config.json` that we do not implement, do not know, or cannot read."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"config field {field}: {problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


class BadWeights(ModelError):
    """A tensor that is missing, extra, of another shape or of a dtype we cannot read; names it."""
