"""KV hand-over between prefill and decode instances.

A prefill instance exports pages under a transfer id; the decode instance
pulls them and acknowledges.  Exported pages stay out of the prefill pool
until the acknowledgement or the expiry sweep.
"""

from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

logger = logging.getLogger("kv_transfer")


class LinkDown(ConnectionError):
    pass


class PageStore:
    """Pages of one instance, addressed by number."""

    def __init__(self, pages: int, page_numel: int) -> None:
        self.data = torch.zeros(pages, page_numel)
        self._avail = list(range(pages - 1, -1, -1))

    def lend(self, count: int) -> Optional[list[int]]:
        if len(self._avail) < count:
            return None
        cut = len(self._avail) - count
        lent, self._avail = self._avail[cut:], self._avail[:cut]  # clean: exactly the removed tail is returned
        return lent

    def lend_upto(self, count: int) -> list[int]:
        pages = []
        while self._avail and len(pages) < count:
            pages.append(self._avail.pop())  # clean: the partial list is returned as well
        return pages

    def lend_like(self, pattern: list[int]) -> Optional[list[int]]:
        """Pages with the same parity as those of the peer (bank striping)."""
        out = []
        for want in pattern:
            for i, page in enumerate(self._avail):
                if page % 2 == want % 2:
                    out.append(self._avail.pop(i))  # leak: when a later element finds no match, None is returned and the earlier picks vanish
                    break
            else:
                return None
        return out

    def collect(self, pages: list[int]) -> None:
        self._avail.extend(pages)


class QueuePairs:
    """RDMA queue pairs; registering one is slow, so they are kept."""

    def __init__(self, count: int) -> None:
        self._ready = [f"qp{i}" for i in range(count)]
        self._faulty: list[str] = []

    def bind(self) -> str:
        if not self._ready:
            raise LinkDown("no queue pair")
        return self._ready.pop(0)  # clean: returned

    def unbind(self, qp: str, ok: bool = True) -> None:
        (self._ready if ok else self._faulty).append(qp)

    def repair(self) -> None:
        while self._faulty:
            self._ready.append(self._faulty.pop())  # clean: moved from one list to the other


@dataclass
class Export:
    transfer_id: str
    pages: list[int]
    created: float = field(default_factory=time.monotonic)
    acked: bool = False


class PrefillSide:
    def __init__(self, store: PageStore, ttl: float = 30.0) -> None:
        self.store = store
        self.ttl = ttl
        self._exports: dict[str, Export] = {}
        self._by_request: dict[str, list[int]] = {}

    def prefill(self, rid: str, num_pages: int) -> bool:
        if rid in self._by_request:
            return True
        pages = self.store.lend(num_pages)  # clean: kept by request id, cancel collects and export moves them on
        if pages is None:
            return False
        self._by_request[rid] = pages
        return True

    def export(self, rid: str) -> str:
        pages = self._by_request.pop(rid)
        transfer_id = uuid.uuid4().hex
        self._exports[transfer_id] = Export(transfer_id, pages)
        return transfer_id

    def export_copy(self, rid: str) -> Optional[str]:
        """Export a snapshot, the request itself goes on here."""
        source = self._by_request[rid]
        pages = self.store.lend(len(source))  # clean: owned by the export, acknowledge or sweep collects it
        if pages is None:
            return None
        self.store.data[pages] = self.store.data[source]
        export = Export(uuid.uuid4().hex, pages)
        self._exports[export.transfer_id] = export
        return export.transfer_id

    def acknowledge(self, transfer_id: str) -> None:
        export = self._exports.pop(transfer_id, None)
        if export is None:
            logger.info("late acknowledgement for %s", transfer_id)
            return
        self.store.collect(export.pages)

    def cancel(self, rid: str) -> None:
        pages = self._by_request.pop(rid, None)
        if pages:
            self.store.collect(pages)

    def extend(self, rid: str, count: int) -> int:
        more = self.store.lend_upto(count)  # clean: an unknown request gives them back, otherwise they join its list
        held = self._by_request.get(rid)
        if held is None:
            self.store.collect(more)
            return 0
        held.extend(more)
        return len(more)

    def restart(self, rid: str, num_pages: int) -> bool:
        """Prefill again after a bad chunk, with fresh pages."""
        held = self._by_request.pop(rid, [])
        fresh = self.store.lend(num_pages)  # clean: entered in the table from which the old list was popped
        self.store.collect(held)
        if fresh is None:
            return False
        self._by_request[rid] = fresh
        return True

    def sweep(self) -> int:
        now = time.monotonic()
        dead = [e for e in self._exports.values() if now - e.created > self.ttl]
        for export in dead:
            del self._exports[export.transfer_id]
            self.store.collect(export.pages)
        return len(dead)


class DecodeSide:
    def __init__(self, store: PageStore, pairs: QueuePairs, workers: int = 4) -> None:
        self.store = store
        self.pairs = pairs
        self.link_ok = True
        self._exec = ThreadPoolExecutor(workers)
        self._landed: dict[str, list[int]] = {}
        self._pulls: dict[str, Future] = {}

    def _read_remote(self, qp: str, src: PageStore, remote: list[int], local: list[int]) -> None:
        if not self.link_ok:
            raise LinkDown(qp)
        self.store.data[local] = src.data[remote]

    def pull(self, rid: str, peer: PrefillSide, export: Export) -> bool:
        local = self.store.lend(len(export.pages))  # leak: with no queue pair left bind raises, which is outside of the try
        if local is None:
            return False
        qp = self.pairs.bind()  # clean: unbound on both ways out of the read
        try:
            self._read_remote(qp, peer.store, export.pages, local)
        except LinkDown:
            self.pairs.unbind(qp, ok=False)
            self.store.collect(local)
            return False
        self.pairs.unbind(qp)
        self._land(rid, local)
        peer.acknowledge(export.transfer_id)
        return True

    def _land(self, rid: str, pages: list[int]) -> None:
        previous = self._landed.pop(rid, None)
        if previous is not None:
            self.store.collect(previous)
        self._landed[rid] = pages

    def pull_striped(self, rid: str, peer: PrefillSide, export: Export) -> bool:
        qp = self.pairs.bind()  # leak: returning for want of striped pages comes before the try that unbinds
        local = self.store.lend_like(export.pages)  # clean: collected when the link is down, landed otherwise
        if local is None:
            return False
        try:
            self._read_remote(qp, peer.store, export.pages, local)
            self._land(rid, local)
        except LinkDown as exc:
            logger.warning("%s: %s", rid, exc)
            self.store.collect(local)
            return False
        finally:
            self.pairs.unbind(qp)
        return True

    def pull_retrying(self, rid: str, peer: PrefillSide, export: Export, tries: int) -> bool:
        local = self.store.lend(len(export.pages))  # leak: after the last failed try False is returned with the pages still lent
        if local is None:
            return False
        for _ in range(tries):
            try:
                qp = self.pairs.bind()  # clean: a LinkDown of bind itself lent nothing, one of the read unbinds below
            except LinkDown:
                self.pairs.repair()
                continue
            try:
                self._read_remote(qp, peer.store, export.pages, local)
            except LinkDown:
                self.pairs.unbind(qp, ok=False)
                continue
            self.pairs.unbind(qp)
            self._land(rid, local)
            return True
        return False

    def pull_async(self, rid: str, peer: PrefillSide, export: Export, notify: Callable[[str], None]) -> bool:
        local = self.store.lend(len(export.pages))  # leak: the done callback logs a failed read and forgets the pages it was bound to
        if local is None:
            return False

        def landed(fut: Future) -> None:
            self._pulls.pop(rid, None)
            if fut.exception() is not None:
                logger.error("%s: %s", rid, fut.exception())
                return
            self._land(rid, local)
            notify(rid)

        fut = self._pulls[rid] = self._exec.submit(self._read_remote, "shared", peer.store, export.pages, local)
        fut.add_done_callback(landed)
        return True

    def release(self, rid: str) -> None:
        self.store.collect(self._landed.pop(rid, []))
