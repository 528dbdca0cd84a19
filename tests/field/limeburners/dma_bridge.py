"""Host side of a camera board: DMA channels, descriptor chains, and a mailbox to the co-processor.

Mirrors the C firmware closely: error codes in place of exceptions, bit masks for allocation, and handles that
are small integers.
"""
from __future__ import annotations

import struct
from typing import Callable, List, Optional, Tuple

EOK, EBUSY, ENOMEM, EIO = 0, -1, -2, -3


class ChannelMask:
    """Bit mask allocator of DMA channels."""

    def __init__(self, n: int):
        self.free_bits = (1 << n) - 1
        self.n = n

    def request(self) -> int:
        if not self.free_bits:
            return EBUSY
        ch = (self.free_bits & -self.free_bits).bit_length() - 1
        self.free_bits &= ~(1 << ch)
        return ch

    def request_fixed(self, ch: int) -> bool:
        if not self.free_bits >> ch & 1:
            return False
        self.free_bits &= ~(1 << ch)
        return True

    def relinquish(self, ch: int) -> None:
        self.free_bits |= 1 << ch


class Descriptor:
    __slots__ = ("src", "dst", "length", "next")

    def __init__(self):
        self.src = self.dst = self.length = 0
        self.next: Optional["Descriptor"] = None


class DescriptorHeap:
    """Free list threaded through `next`."""

    def __init__(self, n: int):
        self.head: Optional[Descriptor] = None
        self.count = 0
        for _ in range(n):
            self.put(Descriptor())

    def get(self) -> Optional[Descriptor]:
        d = self.head
        if d is None:
            return None
        self.head = d.next
        d.next = None
        self.count -= 1
        return d

    def put(self, d: Descriptor) -> None:
        d.next = self.head
        self.head = d
        self.count += 1

    def put_chain(self, d: Optional[Descriptor]) -> None:
        while d is not None:
            following = d.next
            self.put(d)
            d = following

    def get_chain(self, n: int) -> Optional[Descriptor]:
        """n linked descriptors, or None with nothing held."""
        first: Optional[Descriptor] = None
        for _ in range(n):
            d = self.get()  # clean: linked into the chain, or None
            if d is None:
                self.put_chain(first)
                return None
            d.next = first
            first = d
        return first


class Bridge:
    def __init__(self, chans: ChannelMask, heap: DescriptorHeap, poke: Callable[[int, bytes], int]):
        self.chans = chans
        self.heap = heap
        self.poke = poke
        self.active: List[Tuple[int, Descriptor]] = []
        self.stream_ch = EBUSY
        self.audio_ch = EBUSY

    def memset(self, dst: int, value: int, length: int) -> int:
        ch = self.chans.request()  # leak: the return for want of a descriptor keeps the channel
        if ch < 0:
            return EBUSY
        d = self.heap.get()  # clean: put back, or None
        if d is None:
            return ENOMEM
        d.src, d.dst, d.length = value, dst, length
        rc = self.poke(ch, struct.pack("<III", value, dst, length))
        self.heap.put(d)
        self.chans.relinquish(ch)
        return rc

    def scatter(self, pieces: List[Tuple[int, int, int]]) -> int:
        """Asynchronous; `reap` ends it."""
        ch = self.chans.request()  # clean: near miss, put in active and ended by reap
        if ch < 0:
            return EBUSY
        chain = self.heap.get_chain(len(pieces))  # clean: near miss, put in active and ended by reap
        if chain is None:
            self.chans.relinquish(ch)
            return ENOMEM
        d: Optional[Descriptor] = chain
        for src, dst, length in pieces:
            d.src, d.dst, d.length = src, dst, length
            d = d.next
        self.active.append((ch, chain))
        return EOK

    def reap(self, done: Callable[[int], bool]) -> int:
        still = []
        n = 0
        for ch, chain in self.active:
            if not done(ch):
                still.append((ch, chain))
                continue
            self.heap.put_chain(chain)
            self.chans.relinquish(ch)
            n += 1
        self.active = still
        return n

    def gather(self, pieces: List[Tuple[int, int, int]]) -> int:
        """Synchronous; the chain is as long as the list of pieces."""
        ch = self.chans.request()  # clean: relinquished on each return
        if ch < 0:
            return EBUSY
        chain = self.heap.get_chain(len(pieces))  # leak: of the chain only the first descriptor is put back
        if chain is None:
            self.chans.relinquish(ch)
            return ENOMEM
        rc = EOK
        d: Optional[Descriptor] = chain
        for src, dst, length in pieces:
            d.src, d.dst, d.length = src, dst, length
            rc = rc or self.poke(ch, struct.pack("<III", src, dst, length))
            d = d.next
        self.heap.put(chain)
        self.chans.relinquish(ch)
        return rc

    def stream_on(self) -> int:
        if self.stream_ch >= 0:
            return EOK
        self.stream_ch = self.chans.request()  # clean: near miss, stream_off relinquishes it
        return EOK if self.stream_ch >= 0 else EBUSY

    def stream_off(self) -> None:
        if self.stream_ch >= 0:
            self.chans.relinquish(self.stream_ch)
        self.stream_ch = EBUSY

    def audio_on(self, preferred: int) -> int:
        if self.audio_ch >= 0:
            return EOK
        if self.chans.request_fixed(preferred):  # leak: audio_off never relinquishes the channel
            self.audio_ch = preferred
            return EOK
        return EBUSY

    def audio_off(self) -> None:
        if self.audio_ch >= 0:
            self.poke(self.audio_ch, b"\0\0\0\0")
        self.audio_ch = EBUSY

    def fastest(self, payload: bytes, clock: Callable[[], float]) -> int:
        """Holds the best channel so far while it tries the others; the caller gets it."""
        best, best_time = EBUSY, float("inf")
        while True:
            ch = self.chans.request()  # leak: a faster one replaces best, the former best is not relinquished
            if ch < 0:
                return best
            t0 = clock()
            rc = self.poke(ch, payload)
            took = clock() - t0
            if rc == EOK and took < best_time:
                best, best_time = ch, took
            else:
                self.chans.relinquish(ch)
                return best

    def with_retry(self, payload: bytes, tries: int) -> int:
        rc = EIO
        for _ in range(tries):
            ch = self.chans.request()  # leak: a failed poke goes to the next try with the channel held
            if ch < 0:
                return EBUSY
            rc = self.poke(ch, payload)
            if rc == EOK:
                self.chans.relinquish(ch)
                break
        return rc

    def with_retry_same(self, payload: bytes, tries: int) -> int:
        ch = self.chans.request()  # clean: near miss, one channel for all tries
        if ch < 0:
            return EBUSY
        rc = EIO
        while tries > 0 and rc != EOK:
            rc = self.poke(ch, payload)
            tries -= 1
        self.chans.relinquish(ch)
        return rc


class Mailbox:
    """Single-word mailbox with a hand-made lock word."""

    def __init__(self):
        self._held_by: Optional[str] = None
        self.word = 0
        self.log: List[int] = []

    def lock(self, who: str) -> bool:
        if self._held_by is not None:
            return False
        self._held_by = who
        return True

    def unlock(self) -> None:
        self._held_by = None

    def exchange(self, who: str, word: int) -> Optional[int]:
        if not self.lock(who):  # leak: a full mailbox is left locked
            return None
        if self.word != 0:
            return None
        self.word, reply = word, len(self.log)
        self.unlock()
        return reply

    def drain(self, who: str, sink: Callable[[int], bool]) -> int:
        n = 0
        if self.lock(who):  # clean: near miss, the break leads to the unlock as well
            for word in self.log:
                if not sink(word):
                    break
                n += 1
            del self.log[:n]
            self.unlock()
        return n
