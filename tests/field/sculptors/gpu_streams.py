"""Copy streams: lending in the base class, taking back in a mixin, one concrete pool per device."""
from __future__ import annotations

import heapq
from collections import Counter

import torch


class StreamLender:
    """Lends the least used stream."""

    def __init__(self, count: int) -> None:
        self._heap: list[tuple[int, int]] = [(0, i) for i in range(count)]
        self._uses: Counter[int] = Counter()
        heapq.heapify(self._heap)

    def checkout(self) -> int | None:
        if not self._heap:
            return None
        uses, ident = heapq.heappop(self._heap)
        self._uses[ident] = uses + 1
        return ident

    def idle(self) -> int:
        return len(self._heap)


class TakesBack:
    _heap: list[tuple[int, int]]
    _uses: Counter

    def checkin(self, ident: int) -> None:
        heapq.heappush(self._heap, (self._uses[ident], ident))

    def checkin_all(self, idents) -> None:
        for ident in idents:
            self.checkin(ident)


class DeviceStreams(TakesBack, StreamLender):
    def __init__(self, device: torch.device, count: int) -> None:
        super().__init__(count)
        self.device = device
        self._real = [torch.cuda.Stream(device) for _ in range(count)]

    def real(self, ident: int) -> torch.cuda.Stream:
        return self._real[ident]


class Offloader:
    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self.busy: dict[str, int] = {}

    def to_host(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        ident = self.streams.checkout()  # clean: checked in after the synchronize
        if ident is None:
            return tensor.cpu()
        stream = self.streams.real(ident)
        with torch.cuda.stream(stream):
            host = tensor.to("cpu", non_blocking=True)
        stream.synchronize()
        self.streams.checkin(ident)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        ident = self.streams.checkout()  # leak: an unpinned tensor is returned without a checkin
        if ident is None:
            return host.to(self.streams.device)
        if not host.is_pinned():
            return host.to(self.streams.device)
        stream = self.streams.real(ident)
        with torch.cuda.stream(stream):
            out = host.to(self.streams.device, non_blocking=True)
        stream.synchronize()
        self.streams.checkin(ident)
        return out

    def fetch(self, host: torch.Tensor) -> torch.Tensor:
        if not host.is_pinned():
            return host.to(self.streams.device)
        ident = self.streams.checkout()  # clean: near miss, the early return lies before it
        if ident is None:
            return host.to(self.streams.device)
        with torch.cuda.stream(self.streams.real(ident)):
            out = host.to(self.streams.device, non_blocking=True)
        self.streams.real(ident).synchronize()
        self.streams.checkin(ident)
        return out

    def spread(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        used: list[int] = []
        copies = []
        for tensor in tensors:
            ident = self.streams.checkout()  # clean: near miss, all of used are checked in at the end
            if ident is None:
                copies.append(tensor.cpu())
                continue
            used.append(ident)
            with torch.cuda.stream(self.streams.real(ident)):
                copies.append(tensor.to("cpu", non_blocking=True))
        for ident in used:
            self.streams.real(ident).synchronize()
        self.streams.checkin_all(used)
        return copies

    def gather(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        used: list[int] = []
        for tensor in tensors:
            ident = self.streams.checkout()  # leak: the list is cleared, nothing is checked in
            if ident is None:
                break
            used.append(ident)
            tensor.record_stream(self.streams.real(ident))
        for ident in used:
            self.streams.real(ident).synchronize()
        used.clear()
        return torch.cat(tensors)

    def begin(self, name: str, tensor: torch.Tensor, host: torch.Tensor) -> bool:
        if name in self.busy:
            return False
        ident = self.streams.checkout()  # clean: near miss, kept in busy, checked in by settle
        if ident is None:
            return False
        with torch.cuda.stream(self.streams.real(ident)):
            host.copy_(tensor, non_blocking=True)
        self.busy[name] = ident
        return True

    def settle(self, name: str) -> None:
        ident = self.busy.pop(name)
        self.streams.real(ident).synchronize()
        self.streams.checkin(ident)

    def swap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        ident = self.streams.checkout()  # leak: the name is used again for the second stream
        if ident is None:
            return
        with torch.cuda.stream(self.streams.real(ident)):
            kept = a.clone()
        ident = self.streams.checkout()  # clean: checked in after the None check
        if ident is None:
            return
        with torch.cuda.stream(self.streams.real(ident)):
            a.copy_(b)
            b.copy_(kept)
        self.streams.real(ident).synchronize()
        self.streams.checkin(ident)
