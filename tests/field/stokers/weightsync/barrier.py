from __future__ import annotations

import threading
from typing import Dict


class UpdateBarrier:
    """Workers that hold the barrier delay the next weight update."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._holders: Dict[str, int] = {}
        self._updating = False

    def hold(self, worker: str) -> bool:
        with self._cond:
            if self._updating:
                return False
            self._holders[worker] = self._holders.get(worker, 0) + 1
            return True

    def unhold(self, worker: str) -> None:
        with self._cond:
            self._holders[worker] -= 1
            if not self._holders[worker]:
                del self._holders[worker]
            self._cond.notify_all()

    def begin_update(self, timeout: float) -> bool:
        with self._cond:
            if self._updating:
                return False
            self._updating = self._cond.wait_for(lambda: not self._holders, timeout)
            return self._updating

    def end_update(self) -> None:
        with self._cond:
            self._updating = False
            self._cond.notify_all()
