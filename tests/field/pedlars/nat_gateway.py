"""Carrier NAT: port blocks per subscriber, mappings with idle times and hairpin flows."""
import ipaddress
import time
from typing import Dict, List, NamedTuple, Optional, Tuple


class PortBlock(NamedTuple):
    address: str
    first: int
    size: int


class BlockAllocator:
    """Public addresses cut into blocks of ports; each address has its own size of block."""

    def __init__(self, plan: Dict[str, int]) -> None:
        self._blocks = [PortBlock(a, p, n) for a, n in plan.items() for p in range(1024, 65536 - n, n)]

    def assign(self) -> Optional[PortBlock]:
        return self._blocks.pop() if self._blocks else None

    def reclaim(self, block: PortBlock) -> None:
        self._blocks.append(block)


class PortPool:
    """Ports of one subscriber; takes blocks from the allocator when it runs dry."""

    def __init__(self, allocator: BlockAllocator, max_blocks: int) -> None:
        self.allocator = allocator
        self.max_blocks = max_blocks
        self.blocks: List[PortBlock] = []
        self._ports: List[Tuple[str, int]] = []

    def pick(self) -> Optional[Tuple[str, int]]:
        if not self._ports and len(self.blocks) < self.max_blocks:
            block = self.allocator.assign()  # clean: near miss, in blocks until dissolve()
            if block is not None:
                self.blocks.append(block)
                self._ports += [(block.address, block.first + i) for i in range(block.size)]
        return self._ports.pop() if self._ports else None

    def unpick(self, port: Tuple[str, int]) -> None:
        self._ports.append(port)

    def dissolve(self) -> None:
        for block in self.blocks:
            self.allocator.reclaim(block)
        self.blocks = []
        self._ports = []


class StaticPool:
    """Ports of one block for a customer with a fixed range."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.block = allocator.assign()  # leak: resize() puts another in its place
        self.used: Dict[int, str] = {}

    def resize(self, size: int) -> bool:
        if self.block is not None and self.block.size >= size:
            return True
        bigger = self.allocator.assign()  # leak: a block still too small is not reclaimed
        if bigger is None or bigger.size < size:
            return False
        self.block = bigger
        return True

    def close(self) -> None:
        if self.block is not None:
            self.allocator.reclaim(self.block)
            self.block = None
        self.used.clear()


class Mapping:
    __slots__ = ("inner", "outer", "touched", "pinned")

    def __init__(self, inner: Tuple[str, int], outer: Tuple[str, int], pinned: bool) -> None:
        self.inner = inner
        self.outer = outer
        self.touched = time.monotonic()
        self.pinned = pinned


class Translator:
    def __init__(self, pool: PortPool, idle: float) -> None:
        self.pool = pool
        self.idle = idle
        self.by_inner: Dict[Tuple[str, int], Mapping] = {}
        self.by_outer: Dict[Tuple[str, int], Mapping] = {}
        self.forwards: Dict[str, Tuple[str, int]] = {}
        self.denied = 0

    def outbound(self, inner: Tuple[str, int]) -> Optional[Tuple[str, int]]:
        found = self.by_inner.get(inner)
        if found is not None:
            found.touched = time.monotonic()
            return found.outer
        outer = self.pool.pick()  # clean: near miss, sweep() or forget() gives it back by way of _remove()
        if outer is None:
            self.denied += 1
            return None
        mapping = Mapping(inner, outer, pinned=False)
        self.by_inner[inner] = self.by_outer[outer] = mapping
        return outer

    def _remove(self, mapping: Mapping) -> None:
        del self.by_inner[mapping.inner]
        del self.by_outer[mapping.outer]
        self.pool.unpick(mapping.outer)

    def forget(self, inner: Tuple[str, int]) -> bool:
        mapping = self.by_inner.get(inner)
        if mapping is None:
            return False
        self._remove(mapping)
        return True

    def sweep(self) -> int:
        floor = time.monotonic() - self.idle
        stale = [m for m in self.by_inner.values() if not m.pinned and m.touched < floor]
        for m in stale:
            self._remove(m)
        return len(stale)

    def forward(self, service: str) -> Optional[int]:
        """Opens an inward port for a named service of the subscriber."""
        if service in self.forwards:
            return self.forwards[service][1]
        port = self.pool.pick()  # leak: unforward() deletes the entry and not the use
        if port is None:
            return None
        self.forwards[service] = port
        return port[1]

    def unforward(self, service: str) -> bool:
        if service not in self.forwards:
            return False
        del self.forwards[service]
        return True

    def pair(self) -> Optional[Tuple[Tuple[str, int], Tuple[str, int]]]:
        """Two neighbouring ports for RTP and RTCP; both are the caller's."""
        even = self.pool.pick()  # clean: returned or given back
        if even is None:
            return None
        odd = self.pool.pick()  # clean: returned or given back
        if odd is None:
            self.pool.unpick(even)
            return None
        if abs(even[1] - odd[1]) != 1:
            self.pool.unpick(even)
            self.pool.unpick(odd)
            return None
        return even, odd

    def media_check(self) -> bool:
        got = self.pair()  # clean: both halves given back
        if got is None:
            return False
        rtp, rtcp = got
        self.pool.unpick(rtp)
        self.pool.unpick(rtcp)
        return True

    def media_port(self, host: str) -> int:
        got = self.pair()  # leak: the second of the two is never given back
        if got is None or not ipaddress.ip_address(host).is_private:
            return 0
        rtp, _ = got
        self.pool.unpick(rtp)
        return rtp[1]
