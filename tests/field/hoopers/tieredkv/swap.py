"""Moves sequences between the tiers."""
import enum
import logging
from dataclasses import dataclass, field
from typing import Dict, List

from .lanes import CopyFailed, Lanes
from .tiers import DiskTier, Reservation, Tier, TierFull

log = logging.getLogger("tieredkv.swap")


class Where(enum.Enum):
    NOWHERE = 0
    GPU = 1
    CPU = 2
    DISK = 3


@dataclass
class Seq:
    rid: str
    where: Where = Where.NOWHERE
    pages: List[int] = field(default_factory=list)
    slots: List[int] = field(default_factory=list)
    last_step: int = 0


class SwapManager:
    def __init__(self, gpu: Tier, cpu: Tier, disk: DiskTier, lanes: Lanes, host):
        self.gpu, self.cpu, self.disk = gpu, cpu, disk
        self.lanes = lanes
        self.host = host
        self._saved: Dict[str, List[int]] = {}

    def swap_out(self, seq: Seq) -> bool:
        try:
            room = Reservation(self.cpu, len(seq.pages))  # clean: near miss, cancelled when the copy fails, else committed to the sequence
        except TierFull:
            return False
        try:
            self.lanes.copy(seq.pages, room.pages)
        except CopyFailed as exc:
            log.warning("%s stays on the device: %s", seq.rid, exc)
            room.cancel()
            return False
        self.gpu.give(seq.pages)
        seq.pages = room.commit()
        seq.where = Where.CPU
        return True

    def swap_in(self, seq: Seq) -> bool:
        """False when the sequence has to wait."""
        try:
            dst = self.gpu.take(len(seq.pages))  # leak: CopyFailed is answered with False, the device pages are not given back
            self.lanes.copy(seq.pages, dst)
        except (TierFull, CopyFailed) as exc:
            log.info("%s cannot come in: %s", seq.rid, exc)
            return False
        self.cpu.give(seq.pages)
        seq.pages, seq.where = dst, Where.GPU
        return True

    def demote(self, seq: Seq) -> bool:
        """Host memory to disk, page by page."""
        slots: List[int] = []
        for page in seq.pages:
            slot = self.disk.write(self.host.bytes_of(page))  # leak: with the disk full half-way, False is returned and the slots written before are forgotten
            if slot is None:
                log.info("%s: disk full after %d pages", seq.rid, len(slots))
                return False
            slots.append(slot)
        self.cpu.give(seq.pages)
        seq.pages, seq.slots, seq.where = [], slots, Where.DISK
        return True

    def promote(self, seq: Seq) -> bool:
        try:
            pages = self.cpu.take(len(seq.slots))  # clean: moves into the sequence
        except TierFull:
            return False
        for page, slot in zip(pages, seq.slots):
            self.host.store(page, self.disk.read(slot))
            self.disk.erase(slot)
        seq.pages, seq.slots, seq.where = pages, [], Where.CPU
        return True

    def drop(self, seq: Seq) -> None:
        if seq.where is Where.GPU:
            self.gpu.give(seq.pages)
        elif seq.where is Where.CPU:
            self.cpu.give(seq.pages)
        for slot in seq.slots:
            self.disk.erase(slot)
        seq.pages, seq.slots, seq.where = [], [], Where.NOWHERE

    def save_prefix(self, key: str, seq: Seq) -> None:
        """A copy of the pages in host memory, for the next request with this prefix."""
        if key in self._saved or seq.where is not Where.GPU:
            return
        while self.cpu.free < len(seq.pages) and self._saved:
            oldest = next(iter(self._saved))
            self.cpu.give(self._saved.pop(oldest))
        copy = self.cpu.take_upto(len(seq.pages))  # clean: near miss, given back when too few, else kept in _saved until it is evicted
        if len(copy) < len(seq.pages):
            self.cpu.give(copy)
            return
        self._saved[key] = copy
        self.lanes.copy_async(seq.pages, copy, None)  # clean: poll() completes the job, it is never cancelled

    def forget_prefixes(self) -> None:
        while self._saved:
            self.cpu.give(self._saved.popitem()[1])
