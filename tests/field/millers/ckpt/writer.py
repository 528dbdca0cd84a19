"""Synchronous and background shard writers."""
import os
import queue
import threading
from typing import BinaryIO, Dict, Mapping, Optional, Tuple

from .manifest import Manifest
from .staging import Staging, StagingArena


class ShardWriter:
    """Appends tensors to shard files, rolling over at ``shard_bytes``."""

    def __init__(self, root: str, rank: int, shard_bytes: int) -> None:
        self.root = root
        self.rank = rank
        self.shard_bytes = shard_bytes
        self.index = 0
        self._file: BinaryIO = open(self._name(), "wb")  # clean: near miss, closed by _roll or by close
        self._written = 0

    def _name(self) -> str:
        return os.path.join(self.root, f"shard-{self.rank}-{self.index}.bin")

    def write(self, payload: memoryview) -> int:
        if self._written and self._written + len(payload) > self.shard_bytes:
            self._roll()
        self._file.write(payload)
        self._written += len(payload)
        return self.index

    def _roll(self) -> None:
        self._file.close()
        self.index += 1
        self._file = open(self._name(), "wb")  # clean: the previous file was closed, this one is closed by close
        self._written = 0

    def close(self) -> None:
        self._file.close()


class DeltaWriter:
    """Shard writer for incremental checkpoints: a new file for every base step."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._file: Optional[BinaryIO] = None

    def rebase(self, step: int) -> None:
        self._file = open(os.path.join(self.root, f"delta-{step}.bin"), "wb")  # leak: the file of the former base is overwritten

    def write(self, payload: bytes) -> None:
        if self._file is None:
            raise RuntimeError("rebase() first")
        self._file.write(payload)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def save_state(root: str, step: int, state: Mapping[str, bytes], arena: StagingArena) -> Manifest:
    manifest = Manifest(root, step)
    writer = ShardWriter(root, 0, arena.nbytes * 4)  # clean: closed in finally
    try:
        for name, data in state.items():
            with arena.staged(data) as view:  # clean: context manager
                manifest.entries[name] = writer.write(view)
    finally:
        writer.close()
    manifest.commit()
    return manifest


def save_ranked(root: str, step: int, rank: int, state: Mapping[str, bytes], arena: StagingArena) -> Optional[Manifest]:
    manifest = Manifest(root, step)
    writer = ShardWriter(root, rank, arena.nbytes * 4)  # leak: oversized tensor returns None without close
    for name, data in state.items():
        staging = arena.reserve()  # leak: not unreserved when fill raises and the save is abandoned
        try:
            staging.fill(data)
        except ValueError:
            return None
        manifest.entries[name] = writer.write(staging.payload())
        arena.unreserve(staging)
    writer.close()
    return manifest


class AsyncWriter:
    """The trainer enqueues staged tensors; one thread writes and unreserves them."""

    def __init__(self, root: str, arena: StagingArena) -> None:
        self._arena = arena
        self._queue: "queue.Queue[Optional[Tuple[str, Staging]]]" = queue.Queue()
        self._writer = ShardWriter(root, 1, arena.nbytes * 4)  # clean: closed by stop
        self.manifest: Dict[str, int] = {}
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def put(self, name: str, data: bytes) -> None:
        staging = self._arena.reserve()  # clean: unreserved on the refused way, otherwise by the writer thread
        if len(data) > self._arena.nbytes:
            self._arena.unreserve(staging)
            raise ValueError(name)
        staging.fill(data)
        self._queue.put((name, staging))

    def offer(self, name: str, data: bytes) -> bool:
        """Best effort: tensors that are already in the manifest are not written twice."""
        staging = self._arena.reserve_nowait()  # leak: a name that was already written returns with the buffer
        if staging is None:
            return False
        if name in self.manifest:
            return True
        staging.fill(data)
        self._queue.put((name, staging))
        return True

    def _drain(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            name, staging = item
            self.manifest[name] = self._writer.write(staging.payload())
            self._arena.unreserve(staging)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._writer.close()
