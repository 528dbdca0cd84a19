"""Bounded checkpoint upload: permits for connections, budget for bytes in flight."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence

log = logging.getLogger(__name__)


class TransferError(Exception):
    pass


class QuotaExceeded(TransferError):
    pass


class PermitGate:
    """Connection permits with a name, so that the dashboard can show the holders."""

    def __init__(self, n: int):
        self._cv = threading.Condition()
        self._left = n
        self.holders: Dict[int, str] = {}
        self._next = 0

    def take_permit(self, who: str) -> int:
        with self._cv:
            while self._left == 0:
                self._cv.wait()
            return self._grant(who)

    def poll_permit(self, who: str) -> Optional[int]:
        with self._cv:
            if self._left == 0:
                return None
            return self._grant(who)

    def _grant(self, who: str) -> int:
        self._left -= 1
        self._next += 1
        self.holders[self._next] = who
        return self._next

    def return_permit(self, permit: int) -> None:
        with self._cv:
            del self.holders[permit]
            self._left += 1
            self._cv.notify()


class ByteBudget:
    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()

    def charge(self, n: int) -> bool:
        with self._lock:
            if self.used + n > self.limit:
                return False
            self.used += n
            return True

    def refund(self, n: int) -> None:
        with self._lock:
            self.used -= n


@dataclass
class Part:
    key: str
    payload: bytes
    done: bool = False


class Uploader:
    def __init__(self, gate: PermitGate, budget: ByteBudget, send: Callable[[str, bytes], None], retries: int = 3):
        self.gate = gate
        self.budget = budget
        self.send = send
        self.retries = retries

    def upload(self, part: Part) -> bool:
        for attempt in range(self.retries):
            permit = self.gate.take_permit(part.key)  # leak: the next attempt takes another after a TransferError
            try:
                self.send(part.key, part.payload)
            except TransferError as exc:
                log.info("attempt %d of %s: %s", attempt, part.key, exc)
                time.sleep(0)
                continue
            part.done = True
            self.gate.return_permit(permit)
            return True
        return False

    def upload_steady(self, part: Part) -> bool:
        permit = self.gate.take_permit(part.key)  # clean: one for all attempts, returned in finally
        try:
            for _ in range(self.retries):
                try:
                    self.send(part.key, part.payload)
                    return True
                except TransferError:
                    continue
            return False
        finally:
            self.gate.return_permit(permit)

    def upload_backoff(self, part: Part) -> bool:
        attempt = 0
        while attempt < self.retries:
            permit = self.gate.take_permit(part.key)  # clean: near miss, returned in both handlers and on success
            try:
                self.send(part.key, part.payload)
            except QuotaExceeded:
                self.gate.return_permit(permit)
                return False
            except TransferError:
                self.gate.return_permit(permit)
                attempt += 1
                continue
            self.gate.return_permit(permit)
            return True
        return False

    def upload_all(self, parts: Sequence[Part]) -> int:
        sent = 0
        for part in parts:
            if not self.budget.charge(len(part.payload)):  # leak: continue for parts already done keeps the charge
                break
            if part.done:
                continue
            if self.upload_steady(part):
                sent += 1
            self.budget.refund(len(part.payload))
        return sent

    def upload_new(self, parts: Sequence[Part]) -> int:
        sent = 0
        for part in parts:
            if part.done:
                continue
            n = len(part.payload)
            if not self.budget.charge(n):  # clean: near miss, False charges nothing, else refunded in finally
                break
            try:
                if not self.upload_steady(part):
                    continue
                sent += 1
            finally:
                self.budget.refund(n)
        return sent

    def upload_metered(self, part: Part) -> bool:
        n = len(part.payload)
        if not self.budget.charge(n):  # leak: no refund when the permit poll comes back empty
            return False
        permit = self.gate.poll_permit(part.key)  # clean: None-checked, returned in finally
        if permit is None:
            return False
        try:
            self.send(part.key, part.payload)
            return True
        except TransferError:
            return False
        finally:
            self.gate.return_permit(permit)
            self.budget.refund(n)


class MirrorSet:
    """Keeps one permit per mirror for as long as the mirror is in use."""

    def __init__(self, gate: PermitGate, names: Sequence[str]):
        self.gate = gate
        self.names = list(names)
        self.live: Dict[str, int] = {}
        self.probing: List[int] = []

    def start(self) -> bool:
        for name in self.names:
            if name in self.live:
                continue
            permit = self.gate.poll_permit(name)  # clean: kept in live, stop returns, also when start fails
            if permit is None:
                self.stop()
                return False
            self.live[name] = permit
        return True

    def probe(self, check: Callable[[str], bool]) -> int:
        ok = 0
        for name in self.names:
            permit = self.gate.poll_permit(name)  # leak: clear drops the permits of mirrors that answered
            if permit is None:
                break
            if check(name):
                ok += 1
                self.probing.append(permit)
            else:
                self.gate.return_permit(permit)
        self.probing.clear()
        return ok

    def stop(self) -> None:
        for permit in self.live.values():
            self.gate.return_permit(permit)
        self.live = {}
