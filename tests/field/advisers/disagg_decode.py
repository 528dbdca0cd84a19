"""Decode side of prefill/decode disaggregation: preallocation, transfer and metadata buffers."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

logger = logging.getLogger(__name__)


class KVPoll(IntEnum):
    Failed = 0
    Bootstrapping = 1
    Transferring = 2
    Success = 3


class MetadataBuffers:
    """Aux buffers addressed by index; first tokens and logprobs land here."""

    def __init__(self, size: int) -> None:
        self.free_indices: deque[int] = deque(range(size))
        self.output_ids = [0] * size

    def alloc(self) -> int:
        if not self.free_indices:
            return -1
        return self.free_indices.popleft()

    def free(self, index: int) -> None:
        self.output_ids[index] = 0
        self.free_indices.append(index)


class PageAllocator:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(num_pages))

    def alloc_pages(self, num_tokens: int) -> list[int] | None:
        need = (num_tokens + self.page_size - 1) // self.page_size
        if need > len(self.free_pages):
            return None
        out, self.free_pages = self.free_pages[:need], self.free_pages[need:]
        return out

    def free_pages_of(self, pages: list[int]) -> None:
        self.free_pages.extend(pages)


@dataclass
class KVReceiver:
    addr: str
    room: int
    state: KVPoll = KVPoll.Bootstrapping

    def init(self, pages: list[int], aux_index: int) -> None:
        self.state = KVPoll.Transferring if self.addr else KVPoll.Failed

    def poll(self) -> KVPoll:
        return self.state


class KVManager:
    def __init__(self) -> None:
        self.rooms: dict[int, KVReceiver] = {}

    def connect(self, addr: str, room: int) -> KVReceiver:
        receiver = KVReceiver(addr, room)
        self.rooms[room] = receiver
        return receiver

    def disconnect(self, receiver: KVReceiver) -> None:
        self.rooms.pop(receiver.room, None)


@dataclass
class DecodeRequest:
    rid: str
    room: int
    prompt_len: int
    receiver: KVReceiver | None = None
    pages: list[int] = field(default_factory=list)
    metadata_index: int = -1
    first_token: int | None = None


class DecodeQueues:
    def __init__(self, kv: KVManager, pages: PageAllocator, meta: MetadataBuffers) -> None:
        self.kv = kv
        self.pages = pages
        self.meta = meta
        self.prealloc: list[DecodeRequest] = []
        self.transfer: list[DecodeRequest] = []
        self.running: dict[str, DecodeRequest] = {}
        self.fake_index = meta.alloc()  # clean: index for warm-up requests, kept on purpose

    def add(self, req: DecodeRequest, addr: str) -> None:
        req.receiver = self.kv.connect(addr, req.room)  # leak: abort_prealloc filters the request away with its receiver still connected
        self.prealloc.append(req)

    def abort_prealloc(self, rid: str) -> None:
        self.prealloc = [r for r in self.prealloc if r.rid != rid]

    def pop_preallocated(self, reserved: int) -> int:
        moved = 0
        rest: list[DecodeRequest] = []
        for pos, req in enumerate(self.prealloc):
            if len(self.pages.free_pages) <= reserved:
                rest.extend(self.prealloc[pos:])
                break
            pages = self.pages.alloc_pages(req.prompt_len)  # leak: with no metadata buffer the request waits on and its pages are dropped
            if pages is None:
                rest.append(req)
                continue
            index = self.meta.alloc()  # clean: into req.metadata_index, freed in poll_transfers
            if index < 0:
                rest.append(req)
                continue
            req.pages, req.metadata_index = pages, index
            req.receiver.init(pages, index)
            self.transfer.append(req)
            moved += 1
        self.prealloc = rest
        return moved

    def poll_transfers(self) -> list[str]:
        failed: list[str] = []
        waiting: list[DecodeRequest] = []
        for req in self.transfer:
            state = req.receiver.poll()
            if state == KVPoll.Transferring:
                waiting.append(req)
                continue
            if state == KVPoll.Success:
                req.first_token = self.meta.output_ids[req.metadata_index]
                self.running[req.rid] = req
            else:
                logger.warning("transfer of %s failed", req.rid)
                self.pages.free_pages_of(req.pages)
                failed.append(req.rid)
            self.meta.free(req.metadata_index)
            self.kv.disconnect(req.receiver)
            req.metadata_index = -1
        self.transfer = waiting
        return failed

    def grow(self, rid: str, num_tokens: int) -> bool:
        extra = self.pages.alloc_pages(num_tokens)  # clean: near miss, freed again when the request has meanwhile gone
        if extra is None:
            return False
        req = self.running.get(rid)
        if req is None:
            self.pages.free_pages_of(extra)
            return False
        req.pages = req.pages + extra
        return True

    def rebuild(self, rid: str) -> bool:
        req = self.running[rid]
        pages = self.pages.alloc_pages(req.prompt_len)  # leak: overwrites the pages that the running request holds
        if pages is None:
            return False
        req.pages = pages
        return True

    def migrate(self, rid: str, addr: str) -> bool:
        req = self.running[rid]
        pages = self.pages.alloc_pages(req.prompt_len)  # clean: near miss, old pages are freed before the new take their place
        if pages is None:
            return False
        index = self.meta.alloc()  # leak: a failed transfer frees the pages and not the metadata index
        if index == -1:
            self.pages.free_pages_of(pages)
            return False
        receiver = self.kv.connect(addr, req.room)  # clean: disconnected on both ways
        receiver.init(pages, index)
        if receiver.poll() == KVPoll.Failed:
            self.kv.disconnect(receiver)
            self.pages.free_pages_of(pages)
            return False
        self.kv.disconnect(receiver)
        self.pages.free_pages_of(req.pages)
        self.meta.free(index)
        req.pages = pages
        return True

    def ping(self, addr: str) -> bool:
        receiver = self.kv.connect(addr, -1)  # clean: near miss, disconnected before the answer is looked at
        state = receiver.poll()
        self.kv.disconnect(receiver)
        if state == KVPoll.Failed:
            return False
        return True

    def warm_up(self, num_tokens: int) -> bool:
        pages = self.pages.alloc_pages(num_tokens)  # clean: near miss, an empty list for no tokens holds nothing
        if not pages:
            return False
        self.meta.output_ids[self.fake_index] = len(pages)
        self.pages.free_pages_of(pages)
        return True

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            self.pages.free_pages_of(req.pages)
            req.pages = []
