from __future__ import annotations

from typing import Dict, Optional

from .quota import Grant, KeyQuota


class GrantTracker:
    """Grants of running streams, restored when a stream closes."""

    def __init__(self, quota: KeyQuota) -> None:
        self.quota = quota
        self._by_stream: Dict[str, Grant] = {}

    def bind(self, sid: str, grant: Grant) -> bool:
        if sid in self._by_stream:
            return False
        self._by_stream[sid] = grant
        return True

    def unbind(self, sid: str) -> Optional[Grant]:
        return self._by_stream.pop(sid, None)

    def done(self, sid: str) -> None:
        grant = self.unbind(sid)
        if grant is not None:
            self.quota.restore(grant)


class GrantScope:
    """async with GrantScope(quota, key, units)"""

    def __init__(self, quota: KeyQuota, key: str, units: int, dry: bool = False) -> None:
        self.quota = quota
        self.key = key
        self.units = units
        self.dry = dry
        self.grant: Optional[Grant] = None

    async def __aenter__(self) -> Optional[Grant]:
        if not self.dry:
            self.grant = await self.quota.obtain_polite(self.key, self.units)  # clean: restored on exit when it was obtained
        return self.grant

    async def __aexit__(self, et, ev, tb) -> None:
        if self.grant is None:
            return
        self.quota.restore(self.grant)
        self.grant = None
