import logging
import threading
from typing import Iterable, List, Optional

from .index import Index, Place
from .tiers import CorruptSlab, DiskTier, HostTier, TierFull

logger = logging.getLogger(__name__)

class TierManager:
    def __init__(self, host: HostTier, disk: DiskTier, device):
        self.host = host
        self.disk = disk
        self.device = device
        self.index = Index()
        self._lock = threading.RLock()

    def store(self, key: bytes, block: int) -> bool:
        with self._lock:
            if key in self.index:
                return True
            try:
                chunk = self.host.alloc()  # clean: near miss, owned by the Place, which demote() and invalidate() release
            except TierFull:
                if not self.demote(1):
                    return False
                chunk = self.host.alloc()  # clean: demote has made room, and it goes into the same Place
            self.device.copy_down(block, chunk.view)
            self.index.put(Place(key, host=chunk))
            return True

    def store_many(self, keys: List[bytes], blocks: List[int]) -> int:
        with self._lock:
            chunks = self.host.alloc_some(len(keys))  # leak: keys that are in the index already skip their chunk, which zip has consumed
            for key, block, chunk in zip(keys, blocks, chunks):
                if key in self.index:
                    continue
                self.device.copy_down(block, chunk.view)
                self.index.put(Place(key, host=chunk))
            return len(chunks)

    def demote(self, n: int) -> int:
        done = 0
        for place in self.index.cold():
            if done == n:
                break
            if place.host is None:
                continue
            if place.slab is None:
                slab = self.disk.new_slab()  # leak: a write that fails continues without drop_slab
                if slab is None:
                    self.index.remove(place.key)
                    place.release(self.host, self.disk)
                    done += 1
                    continue
                try:
                    self.disk.write(slab, place.host.view)
                except CorruptSlab as exc:
                    logger.error("%s", exc)
                    continue
                place.slab = slab
            self.host.free(place.host)
            place.host = None
            done += 1
        return done

    def load(self, key: bytes, block: int) -> bool:
        with self._lock:
            place = self.index.pin(key)  # leak: a chunk that cannot be promoted returns with the pin set
            if place is None:
                return False
            if place.host is None and not self._promote(place):
                return False
            self.device.copy_up(place.host.view, block)
            self.index.unpin(place)
            return True

    def _promote(self, place: Place) -> bool:
        try:
            chunk = self.host.alloc()  # clean: near miss, freed in the handler of CorruptSlab, else owned by the place
        except TierFull:
            return False
        try:
            self.disk.read(place.slab, chunk.view)
        except CorruptSlab:
            self.host.free(chunk)
            return False
        place.host = chunk
        return True

    def prefetch(self, keys: Iterable[bytes]) -> int:
        n = 0
        with self._lock:
            for key in keys:
                place = self.index.pin(key)  # clean: every branch ends at the unpin
                if place is None:
                    break
                if place.host is None and self._promote(place):
                    n += 1
                self.index.unpin(place)
        return n

    def load_group(self, keys: List[bytes], blocks: List[int]) -> bool:
        pinned: List[Place] = []
        with self._lock:
            try:
                for key in keys:
                    place = self.index.pin(key)  # clean: in the list that the finally goes through, unless it is None
                    if place is None:
                        return False
                    pinned.append(place)
                    if place.host is None and not self._promote(place):
                        return False
                for place, block in zip(pinned, blocks):
                    self.device.copy_up(place.host.view, block)
                return True
            finally:
                for place in pinned:
                    self.index.unpin(place)

    def invalidate(self, key: bytes) -> None:
        with self._lock:
            place = self.index.remove(key)
            if place is not None:
                place.release(self.host, self.disk)

    def rename(self, old: bytes, new: bytes) -> bool:
        with self._lock:
            place = self.index.remove(old)
            if place is None:
                return False
            self.invalidate(new)
            fresh = Place(new, slab=place.slab)
            if place.host is not None:
                self.host.free(place.host)
            self.index.put(fresh)
            return True

    def duplicate(self, key: bytes, new: bytes) -> Optional[Place]:
        with self._lock:
            source = self.index.pin(key)  # clean: the finally unpins it
            if source is None:
                return None
            try:
                if source.host is None:
                    return None
                chunk = self.host.alloc()  # leak: a key that is taken already gets None, and the chunk is not freed
                chunk.view[:] = source.host.view
                if new in self.index:
                    return None
                copy = Place(new, host=chunk)
                self.index.put(copy)
                return copy
            except TierFull:
                return None
            finally:
                self.index.unpin(source)

    def scrub(self) -> int:
        chunk = self.host.alloc()  # clean: freed in the finally, TierFull means that there is none
        bad = 0
        try:
            for place in self.index.cold():
                if place.slab is None:
                    continue
                try:
                    self.disk.read(place.slab, chunk.view)
                except CorruptSlab:
                    self.invalidate(place.key)
                    bad += 1
        finally:
            self.host.free(chunk)
        self.disk.repair()
        return bad

    def export(self, keys: Iterable[bytes], sink) -> int:
        n = 0
        for key in keys:
            place = self.index.pin(key)  # clean: unpinned on each way on
            if place is None:
                continue
            if place.host is not None:
                sink.send(key, place.host.view)
                self.index.unpin(place)
                n += 1
                continue
            try:
                bounce = self.host.alloc()  # leak: the handler of CorruptSlab unpins but leaves the bounce chunk
                self.disk.read(place.slab, bounce.view)
            except (TierFull, CorruptSlab):
                self.index.unpin(place)
                continue
            sink.send(key, bounce.view)
            self.host.free(bounce)
            self.index.unpin(place)
            n += 1
        return n

    def close(self) -> None:
        with self._lock:
            for place in self.index.cold():
                self.index.remove(place.key)
                place.release(self.host, self.disk)
            self.disk.close()
