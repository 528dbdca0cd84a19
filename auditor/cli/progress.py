"""A progress bar on standard error, for work that takes long enough to wonder about."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LONG = 0.5  # seconds without an end in sight before a bar appears
EVERY = 0.1  # seconds between two drawings


class ProgressBar:
    """Drawn only when standard error is a terminal; rich is imported only when it is drawn."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._next = time.monotonic() + LONG
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Say that `done` of `total` files are through `stage`."""
        fresh = stage != self._stage
        self._stage = stage
        if not self._shown or (time.monotonic() < self._next and not (fresh and self._bar)):
            return
        self._next = time.monotonic() + EVERY
        if self._bar is None or self._task is None:
            self._bar = _start()
            self._task = self._bar.add_task(stage, total=total)
        self._bar.update(self._task, description=stage, completed=done, total=total, refresh=True)


def _start() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # no thread: worker processes may still be forked
    )
    bar.start()
    return bar
