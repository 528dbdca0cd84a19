"""How long work tells how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is to do."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""
