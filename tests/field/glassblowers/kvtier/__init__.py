"""Two-tier KV pages: HBM in front of host memory, with per-owner quotas."""
from .mover import Mover
from .pools import PagePool, QuotaPool, TieredPool
from .session import Session, SessionTable

__all__ = ["Mover", "PagePool", "QuotaPool", "TieredPool", "Session", "SessionTable", "build"]


def build(hbm_pages: int, host_pages: int, quota: int, copier) -> "tuple[SessionTable, Mover]":
    hbm = QuotaPool(PagePool("hbm", hbm_pages), quota)
    host = PagePool("host", host_pages)
    tiers = TieredPool(hbm, host)
    return SessionTable(tiers), Mover(tiers, copier)
