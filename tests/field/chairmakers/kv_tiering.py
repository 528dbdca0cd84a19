"""Three tiers for KV entries that are not in use: device, pinned host memory, local disk.

Copies run on a thread of their own and report through callbacks.
"""
import enum
import json
import os
import queue
import threading
from typing import Callable, Dict, List, NamedTuple, Optional

MIN_EXTENT = 64 * 1024


class HostFull(Exception): ...


class CorruptExtent(Exception): ...


Tier = enum.Enum("Tier", "DEVICE HOST DISK")


class DeviceBlocks:
    def __init__(self, count: int) -> None:
        self._free_list = list(range(count))

    def allocate(self, count: int) -> Optional[List[int]]:
        if count > len(self._free_list):
            return None
        return [self._free_list.pop() for _ in range(count)]  # clean: near miss, the length was checked, so none of them is lost half way

    def free(self, blocks: List[int]) -> None:
        self._free_list.extend(blocks)


class HostArena:
    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.memory = memoryview(bytearray(pages * page_bytes))
        self._free_pages = list(range(pages))

    def allocate_pages(self, count: int) -> List[int]:
        pages: List[int] = []
        while len(pages) < count:
            try:
                pages.append(self._free_pages.pop())  # clean: near miss, the handler below puts a partial list back before it raises
            except IndexError:
                self._free_pages.extend(pages)
                raise HostFull(f"{count} pages wanted, {len(pages)} there") from None
        return pages

    def free_pages(self, pages: List[int]) -> None:
        self._free_pages.extend(pages)


class Extent(NamedTuple):
    offset: int
    length: int


class DiskExtents:
    def __init__(self, path: str, nbytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: closed in close()
        os.truncate(path, nbytes)
        self._holes: List[Extent] = [Extent(0, nbytes)]

    def allocate(self, length: int) -> Optional[Extent]:
        """First fit. The hole is cut in two when the rest of it is worth keeping."""
        for index, hole in enumerate(self._holes):
            if hole.length < length:
                continue
            hole = self._holes.pop(index)  # leak: a rest shorter than MIN_EXTENT is in no hole and not in the extent either
            rest = hole.length - length
            if rest >= MIN_EXTENT:
                self._holes.insert(index, Extent(hole.offset + length, rest))
            return Extent(hole.offset, length)
        return None

    def free(self, extent: Extent) -> None:
        self._holes.append(extent)
        self._holes.sort()

    def close(self) -> None:
        os.close(self.fd)


class CopyEngine(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._jobs: "queue.Queue" = queue.Queue()
        self._stopping = False
        self._gate = threading.Lock()

    def submit(self, work: Callable[[], None], on_done: Callable[[], None], on_error: Callable[[], None]) -> bool:
        """False when no more work is taken; then neither callback is called."""
        with self._gate:
            if not self._stopping:
                self._jobs.put((work, on_done, on_error))
            return not self._stopping

    def run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            work, on_done, on_error = job
            try:
                work()
            except Exception:
                on_error()
            else:
                on_done()

    def stop(self) -> None:
        with self._gate:
            self._stopping = True
            self._jobs.put(None)
        self.join()


class Entry:
    def __init__(self, key: str, blocks: List[int], nbytes: int) -> None:
        self.key, self.nbytes, self.tier = key, nbytes, Tier.DEVICE
        self.blocks: Optional[List[int]] = blocks
        self.pages: Optional[List[int]] = None
        self.extent: Optional[Extent] = None
        self.busy = self.doomed = False


class TieredStore:
    def __init__(self, device: DeviceBlocks, host: HostArena, disk: DiskExtents, engine: CopyEngine, copier) -> None:
        self.device, self.host, self.disk = device, host, disk
        self.engine, self.copier = engine, copier
        self.entries: Dict[str, Entry] = {}

    def put(self, key: str, block_count: int, nbytes: int) -> Optional[List[int]]:
        """Blocks to be filled for a new entry. They stay the store's."""
        self.drop(key)
        blocks = self.device.allocate(block_count)  # clean: near miss, owned by the entry, and an older one of the key is dropped first
        if blocks is not None:
            self.entries[key] = Entry(key, blocks, nbytes)
        return blocks

    def _release(self, entry: Entry) -> None:
        if entry.tier is Tier.DEVICE:
            self.device.free(entry.blocks)
        elif entry.tier is Tier.HOST:
            self.host.free_pages(entry.pages)
        else:
            self.disk.free(entry.extent)

    def drop(self, key: str) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            entry.doomed = True
            if not entry.busy:
                self._release(entry)

    def _settle(self, entry: Entry) -> None:
        entry.busy = False
        if entry.doomed:
            self._release(entry)

    def demote(self, entry: Entry) -> bool:
        """Device to host."""
        try:
            pages = self.host.allocate_pages(-(-entry.nbytes // self.host.page_bytes))  # clean: near miss, freed by the error callback and when nothing was submitted, else the entry's
        except HostFull:
            return False

        def done() -> None:
            self.device.free(entry.blocks)
            entry.blocks, entry.pages, entry.tier = None, pages, Tier.HOST
            self._settle(entry)

        def failed() -> None:
            self.host.free_pages(pages)
            self._settle(entry)

        entry.busy = True
        accepted = self.engine.submit(lambda: self.copier.to_host(entry.blocks, pages), done, failed)
        if not accepted:
            failed()
        return accepted

    def spill(self, entry: Entry) -> bool:
        extent = self.disk.allocate(entry.nbytes)  # leak: a refused submit() calls neither callback, and here nothing is freed then
        if extent is None:
            return False

        def done() -> None:
            self.host.free_pages(entry.pages)
            entry.pages, entry.extent, entry.tier = None, extent, Tier.DISK
            self._settle(entry)

        def failed() -> None:
            self.disk.free(extent)
            self._settle(entry)

        entry.busy = True
        accepted = self.engine.submit(lambda: self.copier.to_disk(entry.pages, extent), done, failed)
        if not accepted:
            self._settle(entry)
        return accepted

    def promote(self, entry: Entry) -> bool:
        """Host to device."""
        blocks = self.device.allocate(self.copier.blocks_for(entry.nbytes))  # leak: an entry that was dropped during the copy has its pages freed but not these
        if blocks is None:
            return False

        def done() -> None:
            self.host.free_pages(entry.pages)
            if entry.doomed:
                return
            entry.pages, entry.blocks, entry.tier = None, blocks, Tier.DEVICE
            entry.busy = False

        def failed() -> None:
            self.device.free(blocks)
            self._settle(entry)

        entry.busy = True
        accepted = self.engine.submit(lambda: self.copier.to_device(entry.pages, blocks), done, failed)
        if not accepted:
            failed()
        return accepted

    def fetch(self, entry: Entry) -> None:
        """Disk to host, at once, because a prompt is waiting for it."""
        pages = self.host.allocate_pages(-(-entry.nbytes // self.host.page_bytes))  # clean: freed before the raise, else the entry's
        data = os.pread(self.disk.fd, entry.nbytes, entry.extent.offset)
        if len(data) < entry.nbytes:
            self.host.free_pages(pages)
            raise CorruptExtent(entry.key)
        self.copier.scatter(data, self.host.memory, pages)
        self.disk.free(entry.extent)
        entry.extent, entry.pages, entry.tier = None, pages, Tier.HOST

    def compact(self) -> None:
        """Moves extents towards the front of the file."""
        for entry in list(self.entries.values()):
            if entry.tier is not Tier.DISK or entry.busy:
                continue
            better = self.disk.allocate(entry.nbytes)  # leak: an extent that lies behind the present one is left where it is
            if better is None or better.offset > entry.extent.offset:
                continue
            os.pwrite(self.disk.fd, os.pread(self.disk.fd, entry.nbytes, entry.extent.offset), better.offset)
            self.disk.free(entry.extent)
            entry.extent = better

    def save_index(self, path: str) -> None:
        out = open(path + ".tmp", "w")  # leak: nothing on disk returns before the close
        index = {k: [*e.extent] for k, e in self.entries.items() if e.tier is Tier.DISK}
        if not index:
            return
        json.dump(index, out)
        out.close()
        os.replace(path + ".tmp", path)
