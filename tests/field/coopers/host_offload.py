"""Swapping KV blocks between device and host for preempted sequences."""
import dataclasses
import logging
import typing as t

logger = logging.getLogger("offload")

BlockId = int


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    def __init__(self, name: str, n: int):
        self.name = name
        self._free: t.List[BlockId] = list(range(n))
        self._total = n

    def allocate(self) -> BlockId:
        if not self._free:
            raise OutOfBlocks(self.name)
        return self._free.pop()

    def allocate_many(self, n: int) -> t.List[BlockId]:
        got: t.List[BlockId] = []
        try:
            while len(got) < n:
                got.append(self.allocate())  # clean: near miss, running out frees everything got so far
        except OutOfBlocks:
            for b in got:
                self.free(b)
            raise
        return got

    def allocate_up_to(self, n: int) -> t.List[BlockId]:
        got, self._free = self._free[:n], self._free[n:]
        return got

    def free(self, block: BlockId) -> None:
        self._free.append(block)

    def free_many(self, blocks: t.Iterable[BlockId]) -> None:
        self._free.extend(blocks)

    def __len__(self) -> int:
        return len(self._free)


@dataclasses.dataclass
class SeqTable:
    seq_id: int
    device: t.List[BlockId] = dataclasses.field(default_factory=list)
    host: t.List[BlockId] = dataclasses.field(default_factory=list)


CopyFn = t.Callable[[t.List[t.Tuple[BlockId, BlockId]]], bool]


class OffloadManager:
    def __init__(self, device: BlockAllocator, host: BlockAllocator, copy_d2h: CopyFn, copy_h2d: CopyFn):
        self.dev = device
        self.host = host
        self.copy_d2h = copy_d2h
        self.copy_h2d = copy_h2d
        self.tables: t.Dict[int, SeqTable] = {}
        self.shadow: t.Dict[int, t.List[BlockId]] = {}

    def admit(self, seq_id: int, n: int) -> bool:
        if seq_id in self.tables:
            return False
        try:
            blocks = self.dev.allocate_many(n)  # clean: kept in the table, freed in finish
        except OutOfBlocks:
            return False
        self.tables[seq_id] = SeqTable(seq_id, device=blocks)
        return True

    def swap_out(self, seq_id: int) -> bool:
        tab = self.tables[seq_id]
        try:
            dst = self.host.allocate_many(len(tab.device))  # leak: when the copy is refused the host blocks are dropped
        except OutOfBlocks:
            return False
        if not self.copy_d2h(list(zip(tab.device, dst))):
            logger.warning("swap-out of %d refused", seq_id)
            return False
        self.dev.free_many(tab.device)
        tab.device = []
        tab.host.extend(dst)
        return True

    def swap_in(self, seq_id: int) -> bool:
        tab = self.tables[seq_id]
        try:
            dst = self.dev.allocate_many(len(tab.host))  # clean: near miss, freed on a refused copy, else moved to the table
        except OutOfBlocks:
            return False
        if not self.copy_h2d(list(zip(tab.host, dst))):
            self.dev.free_many(dst)
            return False
        self.host.free_many(tab.host)
        tab.host = []
        tab.device.extend(dst)
        return True

    def grow(self, seq_id: int, n: int) -> bool:
        tab = self.tables[seq_id]
        got = self.dev.allocate_up_to(n)  # leak: fewer blocks than asked for gives False and the ones got are forgotten
        if len(got) < n:
            return False
        tab.device += got
        return True

    def grow_best_effort(self, seq_id: int, n: int) -> int:
        tab = self.tables[seq_id]
        got = self.dev.allocate_up_to(n)  # clean: near miss, whatever came is added to the table
        tab.device.extend(got)
        return len(got)

    def mirror(self, seq_id: int, first: int) -> int:
        """Write-through of the cold prefix; `shadow` holds the host copies."""
        tab = self.tables[seq_id]
        old = self.shadow.pop(seq_id, None)
        if old:
            self.host.free_many(old)
        got = self.host.allocate_up_to(first + 1)  # leak: one more is taken than zip pairs up, and only the paired ones are remembered
        pairs = list(zip(tab.device[:first], got))
        self.shadow[seq_id] = [h for _, h in pairs]
        self.copy_d2h(pairs)
        return len(pairs)

    def restore_from_shadow(self, seq_id: int) -> bool:
        src = self.shadow.get(seq_id)
        if not src:
            return False
        dst = []
        try:
            for _ in src:
                dst.append(self.dev.allocate())  # leak: the handler returns False without freeing the blocks already in dst
        except OutOfBlocks:
            return False
        if self.copy_h2d(list(zip(src, dst))):
            self.tables[seq_id].device[:0] = dst
            return True
        self.dev.free_many(dst)
        return False

    def compact(self, seq_id: int) -> int:
        tab = self.tables[seq_id]
        moved = 0
        for i, blk in enumerate(tab.device):
            if not len(self.dev):
                break
            new = self.dev.allocate()  # clean: near miss, either the new or the old one is freed
            if new >= blk:
                self.dev.free(new)
                continue
            tab.device[i] = new
            self.dev.free(blk)
            moved += 1
        return moved

    def host_bandwidth_probe(self, n: int) -> bool:
        dst = self.host.allocate_up_to(n)  # clean: near miss, freed before the result is looked at
        src = self.dev.allocate_up_to(len(dst))  # clean: freed together with dst
        ok = self.copy_d2h(list(zip(src, dst)))
        self.dev.free_many(src)
        self.host.free_many(dst)
        return ok and bool(dst)

    def finish(self, seq_id: int) -> None:
        tab = self.tables.pop(seq_id, None)
        if tab is None:
            return
        self.dev.free_many(tab.device)
        self.host.free_many(tab.host)
        self.host.free_many(self.shadow.pop(seq_id, ()))
