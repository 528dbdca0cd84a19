"""Connections by host, with a cap for each host."""
import http.client
import threading
from typing import Dict, List, Optional


class ConnPool:
    def __init__(self, per_host: int = 4):
        self.per_host = per_host
        self._idle: Dict[str, List[http.client.HTTPSConnection]] = {}
        self._lent: Dict[str, int] = {}
        self._cv = threading.Condition()

    def dial(self, host: str, wait: float = 0.0) -> Optional[http.client.HTTPSConnection]:
        with self._cv:
            if self._lent.get(host, 0) >= self.per_host:
                if not wait or not self._cv.wait_for(lambda: self._lent[host] < self.per_host, wait):
                    return None
            self._lent[host] = self._lent.get(host, 0) + 1
            idle = self._idle.setdefault(host, [])
            return idle.pop() if idle else http.client.HTTPSConnection(host, timeout=30)  # clean: returned to the caller

    def hang_up(self, c: http.client.HTTPSConnection, reuse: bool = True) -> None:
        with self._cv:
            self._lent[c.host] -= 1
            if reuse:
                self._idle[c.host].append(c)
            else:
                c.close()
            self._cv.notify()
