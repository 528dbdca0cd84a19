from __future__ import annotations

from collections import deque
from typing import Deque, Dict

from .embed_cache import EmbedCache
from .processor import MMProcessor
from .types import MMRequest


class MMScheduler:
    def __init__(self, cache: EmbedCache, proc: MMProcessor) -> None:
        self.cache = cache
        self.proc = proc
        self.ready: Deque[MMRequest] = deque()
        self.active: Dict[str, MMRequest] = {}

    def admit(self, req: MMRequest) -> bool:
        slots = self.proc.encode_many(req.images)  # clean: unleased when the audio has no slot, else moved into the request
        if slots is None:
            return False
        if req.audio is not None:
            req.audio_slot = self.proc.encode(req.audio)  # leak: finish unleases the image slots and forgets the audio one
            if req.audio_slot is None:
                for slot in slots:
                    self.cache.unlease(slot)
                return False
        req.slots = slots
        self.ready.append(req)
        return True

    def attach_system_image(self, req: MMRequest, name: str, image: bytes) -> bool:
        if name in req.shared:
            return True
        slot = self.proc.encode_shared(image)  # clean: kept in the request's table, finish unleases it
        if slot is None:
            return False
        req.shared[name] = slot
        return True

    def replace_image(self, req: MMRequest, index: int, image: bytes) -> bool:
        slot = self.proc.encode(image)  # leak: an aborted request returns without taking the slot
        if slot is None or req.aborted:
            return False
        self.cache.unlease(req.slots[index])
        req.slots[index] = slot
        return True

    def start_next(self) -> int:
        started = 0
        while self.ready:
            req = self.ready.popleft()
            if req.aborted:
                self.finish(req)
                continue
            self.active[req.rid] = req
            started += 1
        return started

    def finish(self, req: MMRequest) -> None:
        self.active.pop(req.rid, None)
        for slot in req.slots:
            self.cache.unlease(slot)
        req.slots = []
        for slot in req.shared.values():
            self.cache.unlease(slot)
        req.shared.clear()
