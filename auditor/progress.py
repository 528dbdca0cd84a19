"""How long work tells how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the number of files done and the number of all."""


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""
