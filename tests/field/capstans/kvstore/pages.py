from __future__ import annotations

from collections import deque


class PagesExhausted(RuntimeError):
    def __init__(self, tier: str, wanted: int) -> None:
        super().__init__(f"{tier}: {wanted} pages wanted")
        self.tier = tier
        self.wanted = wanted


class PagePool:
    def __init__(self, tier: str, count: int) -> None:
        self.tier = tier
        self._vacant: deque[int] = deque(range(count))

    def __len__(self) -> int:
        return len(self._vacant)

    def draw(self, n: int) -> list[int]:
        """All n pages or none."""
        if n > len(self._vacant):
            raise PagesExhausted(self.tier, n)
        return [self._vacant.popleft() for _ in range(n)]  # clean: handed to the caller after the check

    def draw_or_none(self, n: int) -> list[int] | None:
        try:
            return self.draw(n)  # clean: handed to the caller
        except PagesExhausted:
            return None

    def replenish(self, pages: list[int]) -> None:
        self._vacant.extend(pages)


class TieredPool:
    """Device first, host when the device is short."""

    def __init__(self, device: PagePool, host: PagePool) -> None:
        self.device = device
        self.host = host

    def draw_mixed(self, n: int, max_host: int) -> tuple[list[int], list[int]] | None:
        near = self.device.draw(min(n, len(self.device)))  # leak: too large a host share returns None with the device pages
        rest = n - len(near)
        if rest > max_host:
            return None
        far = self.host.draw_or_none(rest)  # clean: returned with the device pages, or None
        if far is None:
            self.device.replenish(near)
            return None
        return near, far

    def replenish_mixed(self, near: list[int], far: list[int]) -> None:
        self.device.replenish(near)
        self.host.replenish(far)
