"""What the pool says when it is used wrongly: one error class, and messages that name the way out."""

from __future__ import annotations


class PoolError(RuntimeError):
    """Wrong use of a pool: the message names the pool, the places involved (in tracking mode) and the way
    out.
    """


class PoolValueError(PoolError, ValueError):
    """An argument no pool can serve: a negative shape, an unknown dtype, another device."""


class NoRoom(Exception):
    """A store cannot hold another block within its limit; the pool turns it into a counted refusal."""


def megabytes(nbytes: float) -> str:
    """Bytes as a person reads them, always with the unit."""
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.1f} KB"
    return f"{nbytes / (1 << 20):.1f} MB"
