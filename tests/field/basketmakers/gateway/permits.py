"""Permits by tenant."""
from __future__ import annotations

import threading
from typing import Optional


class Permit:
    def __init__(self, book: "PermitBook", tenant: str):
        self._book = book
        self.tenant = tenant
        self._live = True

    def surrender(self) -> None:
        if self._live:
            self._live = False
            self._book._restore(self.tenant)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *exc) -> None:
        self.surrender()


class PermitBook:
    def __init__(self, per_tenant: int, overall: int):
        self.per_tenant = per_tenant
        self._count: dict[str, int] = {}
        self._overall = threading.Semaphore(overall)
        self._lock = threading.Lock()

    def issue(self, tenant: str) -> Optional[Permit]:
        if not self._overall.acquire(blocking=False):  # clean: near miss, released if the tenant is full, else by the permit
            return None
        with self._lock:
            n = self._count.get(tenant, 0)
            if n >= self.per_tenant:
                self._overall.release()
                return None
            self._count[tenant] = n + 1
        return Permit(self, tenant)

    def issue_burst(self, tenant: str, burst: int) -> Optional[Permit]:
        if not self._overall.acquire(timeout=0.2):  # leak: a tenant over its burst returns without the overall release
            return None
        with self._lock:
            n = self._count.get(tenant, 0)
            if n >= self.per_tenant + burst:
                return None
            self._count[tenant] = n + 1
        return Permit(self, tenant)

    def _restore(self, tenant: str) -> None:
        with self._lock:
            self._count[tenant] -= 1
        self._overall.release()
