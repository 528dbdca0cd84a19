"""One transfer session per request."""
from __future__ import annotations

from .regions import Credits, LayerRegions, Region, RegionTable, deregister_keys, deregister_layer, register_layer


class SendSession:
    def __init__(self, table: RegionTable, length: int) -> None:
        self._table = table
        self._region: Region | None = table.register(length)  # leak: close looks at bytes_sent instead of the region
        self.bytes_sent = 0

    @property
    def ready(self) -> bool:
        return self._region is not None

    def push(self, payload: bytes) -> int:
        if self._region is None:
            return 0
        n = min(len(payload), self._region.length)
        self.bytes_sent += n
        return n

    def close(self) -> None:
        if self.bytes_sent > 0:
            self._table.deregister(self._region)
            self._region = None


class RecvSession:
    def __init__(self, table: RegionTable, length: int) -> None:
        self._table = table
        self._region: Region | None = table.register(length)  # clean: near miss, close tests the region itself
        self._closed = False

    def pull(self, n: int) -> bytes:
        if self._region is None:
            return b""
        return bytes(min(n, self._region.length))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._region is not None:
            self._table.deregister(self._region)


class LayeredSession:
    def __init__(self, table: RegionTable) -> None:
        self._table = table
        self.layers: list[LayerRegions] = []
        self.draft_layers: list[LayerRegions] = []
        self._closed = False

    def add_layer(self, length: int) -> bool:
        layer = register_layer(self._table, length)  # clean: close deregisters both halves
        if layer is None:
            return False
        self.layers.append(layer)
        return True

    def add_draft_layer(self, length: int) -> bool:
        layer = register_layer(self._table, length)  # leak: close deregisters its keys only
        if layer is None:
            return False
        self.draft_layers.append(layer)
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for layer in self.layers:
            deregister_layer(self._table, layer)
        for layer in self.draft_layers:
            deregister_keys(self._table, layer)
        self.layers, self.draft_layers = [], []


class CreditWindow:
    """Takes all the credits of a burst on entry."""

    def __init__(self, credits: Credits, burst: int) -> None:
        self._credits = credits
        self._burst = burst
        self._entered = False

    def __enter__(self) -> "CreditWindow":
        self._entered = self._credits.consume(self._burst)  # leak: __exit__ clears _entered before it is tested
        return self

    def __exit__(self, *exc_info) -> None:
        self._entered = False
        if self._entered:
            self._credits.replenish(self._burst)


class CreditScope:
    def __init__(self, credits: Credits, burst: int) -> None:
        self._credits = credits
        self._burst = burst
        self.granted = False

    def __enter__(self) -> "CreditScope":
        self.granted = self._credits.consume(self._burst)  # clean: near miss, the flag says whether it was granted
        return self

    def __exit__(self, *exc_info) -> None:
        granted, self.granted = self.granted, False
        if granted:
            self._credits.replenish(self._burst)
