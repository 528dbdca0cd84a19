"""A daemon thread that gives idle blocks back step by step, and holds its pool only weakly."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_modules.pool.tensor_pool import TensorPool


class Background:
    """Runs until `stop`, or until the pool has died."""

    def __init__(self, pool: TensorPool, idle_seconds: float, every_seconds: float, step_bytes: int) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(pool), self._stop, idle_seconds, every_seconds, step_bytes),
            name=f"give-back-{pool.name}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for a step in progress unless called from the thread itself."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run(
    pool: weakref.ref[TensorPool],
    stop: threading.Event,
    idle_seconds: float,
    every_seconds: float,
    step_bytes: int,
) -> None:
    while not stop.wait(every_seconds):
        here = pool()
        if here is None:
            return
        here.give_back_step(idle_seconds, step_bytes)
        del here  # or this frame would keep the pool alive while it waits
