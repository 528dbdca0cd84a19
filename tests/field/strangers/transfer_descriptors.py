"""RDMA registration for disaggregated prefill: register memory, post, deregister."""
import typing as t


class MemoryRegion:
    def __init__(self, key: int, size: int):
        self.key = key
        self.size = size


class Nic:
    def __init__(self):
        self._next_key = 0x100
        self._regions: t.Dict[int, MemoryRegion] = {}

    def register(self, size: int) -> MemoryRegion:
        self._next_key += 1
        region = MemoryRegion(self._next_key, size)
        self._regions[region.key] = region
        return region

    def deregister(self, region: MemoryRegion) -> None:
        del self._regions[region.key]

    def post(self, region: MemoryRegion, peer: str) -> int:
        return 0 if peer else -1


class Transfer:
    """committed says who owns the region: us until commit, the peer table after."""

    def __init__(self, nic: Nic):
        self.nic = nic
        self.peers: t.Dict[str, t.List[MemoryRegion]] = {}

    def publish(self, peer: str, size: int) -> bool:
        region = self.nic.register(size)  # clean: near miss, committed to the peer table or deregistered in finally
        committed = False
        try:
            if self.nic.post(region, peer) != 0:
                return False
            self.peers.setdefault(peer, []).append(region)
            committed = True
            return True
        finally:
            if not committed:
                self.nic.deregister(region)

    def publish_once(self, peer: str, size: int) -> bool:
        region = self.nic.register(size)  # leak: a failed post returns with the region still registered
        committed = self.nic.post(region, peer) == 0
        if committed:
            self.peers.setdefault(peer, []).append(region)
        return committed

    def disconnect(self, peer: str) -> None:
        for region in self.peers.pop(peer, []):
            self.nic.deregister(region)

    def disconnect_all(self) -> None:
        for peer in tuple(self.peers):
            self.disconnect(peer)

    def probe(self, peer: str) -> t.Optional[int]:
        region = self.nic.register(4096)  # clean: near miss, conditional expression, then deregistered
        status = self.nic.post(region, peer)
        key = region.key if status == 0 else None
        self.nic.deregister(region)
        return key

    def probe_sizes(self, peer: str, sizes: t.Iterable[int]) -> t.Optional[int]:
        best = None
        for size in sizes:
            region = self.nic.register(size)  # leak: the first refusal breaks out of the loop
            if self.nic.post(region, peer) != 0:
                break
            best = size
            self.nic.deregister(region)
        return best

    def handshake(self, peer: str) -> bool:
        local, remote = self._regions_for(peer)  # clean: near miss, both halves of the pair are deregistered
        ok = self.nic.post(local, peer) == self.nic.post(remote, peer) == 0
        self.nic.deregister(local)
        self.nic.deregister(remote)
        return ok

    def _regions_for(self, peer: str) -> t.Tuple[MemoryRegion, MemoryRegion]:
        local = self.nic.register(64)  # clean: near miss, returned as a pair and deregistered by handshake
        remote = self.nic.register(64 + len(peer))  # clean: near miss, returned as a pair and deregistered by handshake
        return local, remote
