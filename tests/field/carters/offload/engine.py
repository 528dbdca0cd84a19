from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Optional, Sequence

from .pages import HostPages, PageLease
from .transfer import Bounce, Mover, Staging, copy_out, copy_out_verified

log = logging.getLogger(__name__)


class OffloadEngine:
    def __init__(self, pages: HostPages, move: Mover) -> None:
        self.pages = pages
        self.move = move
        self._swapped: OrderedDict[str, PageLease] = OrderedDict()

    def swap_out(self, seq_id: str, kv: bytes) -> bool:
        if seq_id in self._swapped:
            return False
        lease = copy_out(self.pages, kv, self.move)  # clean: kept in the table, swap_in surrenders
        if lease is None:
            return False
        self._swapped[seq_id] = lease
        return True

    def swap_in(self, seq_id: str) -> Optional[bytes]:
        lease = self._swapped.pop(seq_id, None)
        if lease is None:
            return None
        kv = self.move(lease.data)
        self.pages.surrender(lease)
        return kv

    def extend(self, seq_id: str, more: bytes) -> bool:
        lease = self._swapped.get(seq_id)
        if lease is None:
            return False
        bigger = self.pages.relocate(lease, len(lease.data) + len(more))  # clean: near miss, takes the old lease's place, which relocate gave up
        if bigger is None:
            return False
        bigger.data += more
        self._swapped[seq_id] = bigger
        return True

    def trim(self, keep: int) -> int:
        trimmed = 0
        while len(self._swapped) > keep:
            _, lease = self._swapped.popitem(last=False)
            self.pages.surrender(lease)
            trimmed += 1
        return trimmed

    def checksum(self, kv: bytes) -> int:
        lease = copy_out(self.pages, kv, self.move)  # leak: summed and forgotten
        if lease is None:
            return 0
        return sum(lease.data) & 0xFFFF

    def swap_out_checked(self, seq_id: str, kv: bytes) -> bool:
        lease = copy_out_verified(self.pages, kv, self.move, verify=True)  # leak: a known sequence returns with the second lease
        if lease is None:
            return False
        if seq_id in self._swapped:
            log.debug("%s is out already", seq_id)
            return True
        self._swapped[seq_id] = lease
        return True

    def swap_group(self, seqs: Sequence[tuple[str, bytes]]) -> bool:
        """All beams of a group or none."""
        taken: list[tuple[str, PageLease]] = []
        for seq_id, kv in seqs:
            lease = copy_out(self.pages, kv, self.move)  # clean: near miss, gathered and surrendered when one is missing
            if lease is None:
                for _, held in taken:
                    self.pages.surrender(held)
                return False
            taken.append((seq_id, lease))
        for seq_id, held in taken:
            old = self._swapped.pop(seq_id, None)
            if old is not None:
                self.pages.surrender(old)
            self._swapped[seq_id] = held
        return True

    def roundtrip(self, kv: bytes) -> bytes:
        with Bounce(self.pages, len(kv)) as bounce:  # clean: with
            if bounce.lease is None:
                return kv
            bounce.lease.data = self.move(kv)
            return self.move(bounce.lease.data)

    def roundtrip_through(self, kv: bytes, lease: PageLease) -> bytes:
        with Bounce(self.pages, len(kv), lease) as bounce:  # clean: near miss, borrows the caller's lease
            assert bounce.lease is not None
            bounce.lease.data = kv
            return bounce.lease.data

    def stage_optimizer(self, name: str, state: bytes) -> bool:
        if name in self._swapped:
            return False
        with Staging(self.pages, len(state)) as st:  # clean: the with ends it
            if not st.ok:
                return False
            st.fill(self.move(state))
            self._swapped[name] = st.detach()
        return name in self._swapped

    def measure(self, kv: bytes) -> int:
        lease = self.pages.lease(len(kv), "measure")  # clean: lent to copy_out and surrendered here
        if lease is None:
            return -1
        done = copy_out(self.pages, kv, self.move, into=lease)  # clean: near miss, same lease as the caller's
        n = len(lease.data) if done is not None else 0
        self.pages.surrender(lease)
        return n

    def defer(self, seq_id: str, kv: bytes, urgent: bool) -> Optional[bytes]:
        lease = None
        if not urgent:
            lease = self.pages.lease(len(kv), seq_id)  # leak: a sequence known already skips both the table and the surrender
        if lease is None:
            return self.move(kv)
        lease.data = kv
        if seq_id not in self._swapped:
            self._swapped[seq_id] = lease
        return None


def main() -> None:
    pages = HostPages(16)
    eng = OffloadEngine(pages, lambda b: bytes(b))
    eng.swap_out("a", b"kvkvkvkv")
    eng.extend("a", b"more")
    print(eng.swap_in("a"), eng.roundtrip(b"xyz"), eng.measure(b"12345"))
    eng.swap_group([("b", b"1234"), ("c", b"5678")])
    eng.stage_optimizer("adam", b"moments")
    eng.trim(0)
    print("free", pages.free)


if __name__ == "__main__":
    main()
