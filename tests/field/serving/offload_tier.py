"""Two-tier offload: GPU pages spill into pinned host pages, and host pages into a spill file."""

import logging
import os
import tempfile
from typing import BinaryIO, Dict, List, NamedTuple, Optional

import torch

logger = logging.getLogger(__name__)


class HostPage(NamedTuple):
    idx: int
    view: torch.Tensor


class PinnedHostPool:
    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self._slab = torch.empty((num_pages, page_bytes), dtype=torch.uint8)
        self._free_bitmap = torch.ones(num_pages, dtype=torch.bool)

    def pin(self) -> Optional[HostPage]:
        idx = int(torch.argmax(self._free_bitmap.to(torch.uint8)))
        if not self._free_bitmap[idx]:
            return None
        self._free_bitmap[idx] = False
        return HostPage(idx, self._slab[idx])

    def unpin(self, page: HostPage) -> None:
        self._free_bitmap[page.idx] = True


class OffloadManager:
    def __init__(self, pool: PinnedHostPool, spill_dir: Optional[str] = None) -> None:
        self.pool = pool
        self.spill_dir = spill_dir or tempfile.gettempdir()
        self.host: Dict[int, HostPage] = {}
        self.spilled: Dict[int, str] = {}
        self.journal: Optional[BinaryIO] = None

    # -- journal ---------------------------------------------------------
    def start_journal(self, name: str) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = open(os.path.join(self.spill_dir, name), "ab")  # clean: the old file is closed first, stop_journal closes this one

    def stop_journal(self) -> None:
        if self.journal is None:
            return
        self.journal.flush()
        self.journal.close()
        self.journal = None

    # -- down ------------------------------------------------------------
    def offload(self, key: int, page: torch.Tensor) -> bool:
        if key in self.host:
            self.host[key].view.copy_(page)
            return True
        hp = self.pool.pin()  # clean: None is checked, else in the table until dropped
        if hp is None:
            return False
        hp.view.copy_(page)
        self.host[key] = hp
        return True

    def offload_or_spill(self, key: int, page: torch.Tensor) -> str:
        hp = self.pool.pin()  # leak: the key that was spilled before returns without unpinning
        if hp is None:
            self._spill(key, page)
            return "disk"
        if key in self.spilled:
            logger.debug("%d lies on disk already", key)
            return "disk"
        self.drop(key)
        self.host[key] = hp
        hp.view.copy_(page)
        return "host"

    def _spill(self, key: int, page: torch.Tensor) -> None:
        path = os.path.join(self.spill_dir, f"{key}.kv")
        f = open(path, "wb")  # clean: closed below
        f.write(page.numpy().tobytes())
        f.close()
        self.spilled[key] = path

    def demote(self, key: int) -> bool:
        hp = self.host.pop(key, None)
        if hp is None:
            return False
        self._spill(key, hp.view)
        self.pool.unpin(hp)
        return True

    # -- up --------------------------------------------------------------
    def _load(self, key: int, size: int) -> Optional[bytes]:
        f = open(self.spilled[key], "rb")  # leak: a short file returns without a close
        raw = f.read(size)
        if len(raw) < size:
            logger.error("%s is truncated", self.spilled[key])
            return None
        f.close()
        return raw

    def _load_header(self, key: int) -> bytes:
        with open(self.spilled[key], "rb") as f:  # clean: with statement
            return f.read(16)

    def promote(self, key: int, dst: torch.Tensor) -> bool:
        staging = self.pool.pin()  # clean: near miss, unpinned in each branch
        if staging is None:
            return False
        raw = self._load(key, dst.numel())
        if raw is None:
            self.pool.unpin(staging)
            return False
        staging.view[: dst.numel()].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        dst.copy_(staging.view[: dst.numel()])
        self.pool.unpin(staging)
        return True

    def promote_batch(self, keys: List[int], dst: torch.Tensor) -> int:
        done = 0
        for i, key in enumerate(keys):
            staging = self.pool.pin()  # leak: a key that is not spilled is skipped with the page pinned
            if staging is None:
                break
            if key not in self.spilled:
                continue
            raw = self._load(key, dst[i].numel())
            if raw is not None:
                staging.view.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
                dst[i].copy_(staging.view)
                done += 1
            self.pool.unpin(staging)
        return done

    def double_buffered(self, keys: List[int], dst: torch.Tensor) -> int:
        ping = self.pool.pin()  # clean: near miss, unpinned when pong is missing and at the end
        if ping is None:
            return 0
        pong = self.pool.pin()  # clean: unpinned at the end
        if pong is None:
            self.pool.unpin(ping)
            return 0
        done = 0
        for i, key in enumerate(keys):
            cur = (ping, pong)[i % 2]
            raw = self._load(key, dst[i].numel())
            if raw is None:
                break
            cur.view.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            dst[i].copy_(cur.view)
            done += 1
        for hp in (ping, pong):
            self.pool.unpin(hp)
        return done

    def checksum_page(self, page: torch.Tensor) -> int:
        return int(self.pool.pin().view.copy_(page).sum())  # leak: only a view of the page is used, the page is lost

    # -- removal ---------------------------------------------------------
    def drop(self, key: int) -> None:
        hp = self.host.pop(key, None)
        if hp is not None:
            self.pool.unpin(hp)

    def close(self) -> None:
        for key in list(self.host):
            self.drop(key)
        self.stop_journal()
