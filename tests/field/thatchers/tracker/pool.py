import threading
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple


class Conn:
    def __init__(self, n: int):
        self.n = n
        self.rows: Dict[str, Dict[str, Any]] = {}
        self.dead = False

    def fetch(self, key: str) -> Optional[Dict[str, Any]]:
        return self.rows.get(key)

    def store(self, key: str, row: Dict[str, Any]) -> None:
        self.rows[key] = row


class ConnPool:
    def __init__(self, size: int, wait: float = 2.0):
        self.wait = wait
        self._idle: Deque[Conn] = deque(Conn(i) for i in range(size))
        self._cv = threading.Condition()

    def getconn(self) -> Optional[Conn]:
        deadline = time.monotonic() + self.wait
        with self._cv:
            while not self._idle:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._cv.wait(left)
            return self._idle.popleft()

    def putconn(self, conn: Conn) -> None:
        if conn.dead:
            conn = Conn(conn.n)
        with self._cv:
            self._idle.append(conn)
            self._cv.notify()

    def getconn_alive(self) -> Optional[Conn]:
        while True:
            conn = self.getconn()  # clean: near miss, dead ones are put back for replacement, a live one goes to the caller
            if conn is None or not conn.dead:
                return conn
            self.putconn(conn)


class RunLocks:
    """Advisory locks by run id, non-reentrant."""

    def __init__(self) -> None:
        self._held: Dict[str, str] = {}
        self._mu = threading.Lock()

    def lock_run(self, run_id: str, owner: str) -> bool:
        with self._mu:
            if run_id in self._held:
                return False
            self._held[run_id] = owner
            return True

    def unlock_run(self, run_id: str) -> None:
        with self._mu:
            self._held.pop(run_id, None)

    def lock_pair(self, a: str, b: str, owner: str) -> bool:
        first, second = sorted((a, b))
        if not self.lock_run(first, owner):  # leak: stays locked when the second run is busy
            return False
        return self.lock_run(second, owner)  # clean: the caller unlocks both

    def holders(self) -> List[Tuple[str, str]]:
        with self._mu:
            return sorted(self._held.items())
