"""Tiered KV offload: a device tier over a host tier over a disk tier, each a wrapper of the next."""
from __future__ import annotations

import logging
import os
import threading
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class DiskTier:
    """Fixed-size records in one file; a record is its number."""

    def __init__(self, path: str, records: int, size: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: kept in self.fd, close() closes it
        self.size = size
        self.spare = set(range(records))

    def obtain(self) -> Optional[int]:
        if not self.spare:
            return None
        return self.spare.pop()  # clean: returned to the caller

    def surrender(self, rec: int) -> None:
        self.spare.add(rec)

    def write(self, rec: int, data: bytes) -> bool:
        return os.pwrite(self.fd, data, rec * self.size) == len(data)

    def read(self, rec: int) -> bytes:
        return os.pread(self.fd, self.size, rec * self.size)

    def close(self) -> None:
        os.close(self.fd)


class HostPage:
    __slots__ = ("no", "data", "rec", "holds")

    def __init__(self, no: int, size: int) -> None:
        self.no = no
        self.data = bytearray(size)
        self.rec: Optional[int] = None
        self.holds = 0


class HostTier:
    """Host pages, each of which may have a record behind it on the disk."""

    def __init__(self, pages: int, size: int, disk: Optional[DiskTier]) -> None:
        self.disk = disk
        self.size = size
        self.stack: List[HostPage] = [HostPage(i, size) for i in range(pages)]
        self.mu = threading.Lock()

    def obtain(self) -> Optional[HostPage]:
        with self.mu:
            if not self.stack:
                return None
            page = self.stack.pop()  # clean: returned to the caller
        page.holds = 1
        return page

    def obtain_backed(self) -> Optional[HostPage]:
        page = self.obtain()  # clean: surrendered when the disk is full, else returned
        if page is None:
            return None
        if self.disk is not None:
            page.rec = self.disk.obtain()  # clean: near miss, surrender() gives it back together with the page
            if page.rec is None:
                self.surrender(page)
                return None
        return page

    def obtain_mirrored(self) -> Optional[HostPage]:
        if self.disk is None:
            return self.obtain()  # clean: returned to the caller
        rec = self.disk.obtain()  # leak: no host page, and the record is forgotten
        if rec is None:
            return None
        page = self.obtain()  # clean: returned with its record
        if page is None:
            return None
        page.rec = rec
        return page

    def hold(self, page: HostPage) -> HostPage:
        with self.mu:
            page.holds += 1
        return page

    def surrender(self, page: HostPage) -> None:
        with self.mu:
            page.holds -= 1
            if page.holds > 0:
                return
            rec, page.rec = page.rec, None
            self.stack.append(page)
        if rec is not None and self.disk is not None:
            self.disk.surrender(rec)

    def flush(self, page: HostPage) -> bool:
        if self.disk is None or page.rec is not None:
            return True
        rec = self.disk.obtain()  # leak: a short write returns False and the record is not surrendered
        if rec is None:
            return False
        if not self.disk.write(rec, bytes(page.data)):
            logger.error("short write of page %d", page.no)
            return False
        page.rec = rec
        return True


class Quota:
    """Per-tenant wrapper of the host tier."""

    def __init__(self, tier: HostTier, per_tenant: int) -> None:
        self.tier = tier
        self.per_tenant = per_tenant
        self.count: Dict[str, int] = {}

    def obtain(self, tenant: str) -> Optional[HostPage]:
        if self.count.get(tenant, 0) >= self.per_tenant:
            return None
        page = self.tier.obtain_backed()  # clean: returned to the caller
        if page is not None:
            self.count[tenant] = self.count.get(tenant, 0) + 1
        return page

    def obtain_late(self, tenant: str) -> Optional[HostPage]:
        page = self.tier.obtain()  # leak: the quota is looked at after the page was taken
        if page is None:
            return None
        used = self.count.get(tenant, 0)
        if used >= self.per_tenant:
            return None
        self.count[tenant] = used + 1
        return page

    def surrender(self, tenant: str, page: HostPage) -> None:
        self.count[tenant] -= 1
        self.tier.surrender(page)


class Offloader:
    def __init__(self, quota: Quota, tier: HostTier, device) -> None:
        self.quota = quota
        self.tier = tier
        self.device = device
        self.where: Dict[Tuple[str, int], HostPage] = {}

    def offload(self, tenant: str, block: int) -> bool:
        key = (tenant, block)
        if key in self.where:
            return True
        page = self.quota.obtain(tenant)  # clean: surrendered when the device refuses, else kept in self.where
        if page is None:
            return False
        if not self.device.copy_out(block, page.data):
            self.quota.surrender(tenant, page)
            return False
        self.where[key] = page
        return True

    def offload_all(self, tenant: str, blocks: List[int]) -> int:
        done = 0
        for b in blocks:
            page = self.quota.obtain(tenant)  # leak: blocks already offloaded continue with a page in hand
            if page is None:
                break
            if (tenant, b) in self.where:
                continue
            if not self.device.copy_out(b, page.data):
                self.quota.surrender(tenant, page)
                break
            self.where[(tenant, b)] = page
            done += 1
        return done

    def fetch(self, tenant: str, block: int) -> bool:
        page = self.where.pop((tenant, block), None)
        if page is None:
            return False
        ok = self.device.copy_in(page.data, block)
        self.quota.surrender(tenant, page)
        return ok

    def share(self, src: Tuple[str, int]) -> Optional[HostPage]:
        page = self.where.get(src)
        if page is None:
            return None
        return self.tier.hold(page)  # clean: the hold is returned to the caller

    def copy_shared(self, src: Tuple[str, int], block: int) -> bool:
        page = self.share(src)  # clean: surrendered in the finally
        if page is None:
            return False
        try:
            return self.device.copy_in(page.data, block)
        finally:
            self.tier.surrender(page)

    def checksum_shared(self, src: Tuple[str, int]) -> int:
        page = self.share(src)  # leak: a page without a record returns 0 with its hold kept
        if page is None:
            return -1
        if page.rec is None:
            return 0
        total = sum(page.data) & 0xFFFFFFFF
        self.tier.surrender(page)
        return total

    def replace(self, tenant: str, block: int, data: bytes) -> bool:
        key = (tenant, block)
        page = self.quota.obtain(tenant)  # clean: near miss, the page that it displaces is surrendered
        if page is None:
            return False
        page.data[: len(data)] = data
        old = self.where.get(key)
        self.where[key] = page
        if old is not None:
            self.quota.surrender(tenant, old)
        return True

    def drop_tenant(self, tenant: str) -> None:
        for key in [k for k in self.where if k[0] == tenant]:
            self.quota.surrender(tenant, self.where.pop(key))
