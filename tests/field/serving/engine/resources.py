import dataclasses
import heapq
import typing as t


@dataclasses.dataclass
class EngineConfig:
    max_seqs: int = 16
    num_blocks: int = 256
    block_size: int = 16
    enable_lora: bool = False
    enable_swap: bool = True


class SeqIdPool:
    """Small ids, lowest first, so that tensors stay dense."""

    def __init__(self, n: int):
        self._heap = list(range(n))

    def reserve_id(self) -> t.Optional[int]:
        if self._heap:
            return heapq.heappop(self._heap)
        return None

    def unreserve_id(self, i: int) -> None:
        heapq.heappush(self._heap, i)


class BlockStore:
    def __init__(self, n: int):
        self._free: t.Set[int] = set(range(n))
        self._refs: t.Dict[int, int] = {}

    def alloc_blocks(self, n: int) -> t.List[int]:
        """Gives as many as there are, n at most."""
        out = []
        for _ in range(min(n, len(self._free))):
            b = self._free.pop()
            self._refs[b] = 1
            out.append(b)
        return out

    def share(self, blocks: t.Iterable[int]) -> t.List[int]:
        out = list(blocks)
        for b in out:
            self._refs[b] += 1
        return out

    def dealloc_blocks(self, blocks: t.Iterable[int]) -> None:
        for b in blocks:
            self._refs[b] -= 1
            if not self._refs[b]:
                del self._refs[b]
                self._free.add(b)


class AdapterLease:
    def __init__(self, table: "AdapterTable", name: str):
        self.table = table
        self.name = name

    def release(self) -> None:
        self.table.users[self.name] -= 1


class AdapterTable:
    def __init__(self) -> None:
        self.users: t.Dict[str, int] = {}

    def acquire_adapter(self, name: str) -> AdapterLease:
        self.users[name] = self.users.get(name, 0) + 1
        return AdapterLease(self, name)
