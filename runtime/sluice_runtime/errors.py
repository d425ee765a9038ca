"""What can go wrong in any service of ours."""

from __future__ import annotations


class ServiceError(Exception):
    """Base of this package's errors."""


class SpecError(ServiceError):
    """A service was asked for something it cannot be; names the field and the remedy."""
