"""Host staging for weight and KV uploads."""
import logging
import os
from pathlib import Path
from typing import BinaryIO, Dict, Iterable, Iterator, List, Optional, Union

import torch

_log = logging.getLogger("staging")


class PinnedArena:
    def __init__(self, chunk_bytes: int, chunks: int):
        pin_ok = torch.cuda.is_available()
        self.chunk_bytes = chunk_bytes
        self._chunks = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=pin_ok) for _ in range(chunks)]
        self._free = set(range(chunks))

    def pin(self, nbytes: int) -> Optional["PinnedChunk"]:
        if nbytes > self.chunk_bytes or not self._free:
            return None
        i = self._free.pop()
        return PinnedChunk(i, self._chunks[i][:nbytes])

    def unpin(self, chunk: "PinnedChunk") -> None:
        self._free.add(chunk.index)

    def __len__(self) -> int:
        return len(self._free)


class PinnedChunk:
    def __init__(self, index: int, data: torch.Tensor):
        self.index = index
        self.data = data


class WeightUploader:
    def __init__(self, arena: PinnedArena, device: Union[str, torch.device]):
        self.arena = arena
        self.device = torch.device(device)
        self._inflight: List[PinnedChunk] = []

    def upload(self, t: torch.Tensor) -> torch.Tensor:
        nbytes = t.numel() * t.element_size()
        chunk = self.arena.pin(nbytes)  # clean: near miss, a missing chunk takes the slow path
        if chunk is None:
            return t.to(self.device)
        host = chunk.data.view(t.dtype).view_as(t)
        host.copy_(t)
        dev = host.to(self.device, copy=True)
        self.arena.unpin(chunk)
        return dev

    def upload_async(self, t: torch.Tensor) -> torch.Tensor:
        chunk = self.arena.pin(t.numel() * t.element_size())  # clean: kept among those in flight, flush unpins them
        if chunk is None:
            self.flush()
            return t.to(self.device)
        host = chunk.data.view(t.dtype).view_as(t)
        host.copy_(t)
        self._inflight.append(chunk)
        return host.to(self.device, non_blocking=True)

    def flush(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._inflight:
            self.arena.unpin(self._inflight.pop())

    def upload_file(self, path: str, size: int) -> Optional[torch.Tensor]:
        fh = open(path, "rb")  # leak: stays open when no chunk can be pinned
        chunk = self.arena.pin(size)  # clean: unpinned after the copy
        if chunk is None:
            return None
        fh.readinto(chunk.data.numpy())
        out = chunk.data.to(self.device, copy=True)
        self.arena.unpin(chunk)
        fh.close()
        return out

    def upload_shards(self, paths: Iterable[str]) -> Dict[str, torch.Tensor]:
        result: Dict[str, torch.Tensor] = {}
        for p in paths:
            size = os.path.getsize(p)
            chunk = self.arena.pin(size)  # leak: an empty shard is skipped with its chunk pinned
            if chunk is None:
                _log.warning("no staging for %s", p)
                continue
            with open(p, "rb") as fh:  # clean: with statement
                n = fh.readinto(chunk.data.numpy())
            if not n:
                _log.info("%s is empty", p)
                continue
            result[p] = chunk.data.to(self.device, copy=True)
            self.arena.unpin(chunk)
        return result

    def checksum(self, path: Path) -> int:
        fh: BinaryIO = open(path, "rb")  # clean: closed in the finally
        try:
            total = 0
            for block in iter(lambda: fh.read(1 << 20), b""):
                total = (total + sum(block)) & 0xFFFFFFFF
            return total
        finally:
            fh.close()

    def stream(self, path: str, step: int) -> Iterator[torch.Tensor]:
        chunk = self.arena.pin(step)  # leak: a short read ends the generator before unpin
        if chunk is None:
            return
        with open(path, "rb") as fh:  # clean: with statement
            while True:
                n = fh.readinto(chunk.data.numpy())
                if n < step:
                    return
                yield chunk.data.to(self.device, copy=True)
        self.arena.unpin(chunk)

    def stream_tail(self, path: str, step: int) -> Iterator[torch.Tensor]:
        chunk = self.arena.pin(step)  # clean: near miss, the loop is left by break and then unpins
        if chunk is None:
            return
        with open(path, "rb") as fh:  # clean: with statement
            while True:
                n = fh.readinto(chunk.data.numpy())
                if not n:
                    break
                yield chunk.data[:n].to(self.device, copy=True)
        self.arena.unpin(chunk)


class Manifest:
    def __init__(self, root: Path):
        self.root = root
        self.index = open(root / "index.txt")  # clean: closed by close
        self.blob = open(root / "weights.bin", "rb")  # leak: close only closes the index

    def names(self) -> List[str]:
        self.index.seek(0)
        return [ln.strip() for ln in self.index]

    def read(self, off: int, n: int) -> bytes:
        self.blob.seek(off)
        return self.blob.read(n)

    def close(self) -> None:
        self.index.close()


def first_line(path: str) -> str:
    return open(path).readline()  # leak: file object dropped without close
