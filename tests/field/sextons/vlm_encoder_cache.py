from __future__ import annotations

import enum
import hashlib
from collections import deque
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class FeatureSlot:
    idx: int
    mm_hash: str = ""
    users: int = 0
    ready: bool = False


class EncoderCache:
    """Slots for image/audio features, shared between requests by content hash."""

    def __init__(self, n_slots: int, tokens: int, hidden: int) -> None:
        self.features = torch.empty(n_slots, tokens, hidden, dtype=torch.bfloat16, device="cuda")
        self._vacant: deque[FeatureSlot] = deque(FeatureSlot(i) for i in range(n_slots))
        self._by_hash: dict[str, FeatureSlot] = {}

    def acquire(self, mm_hash: str) -> FeatureSlot | None:
        slot = self._by_hash.get(mm_hash)
        if slot is None:
            if not self._vacant:
                return None
            slot = self._vacant.popleft()
            slot.mm_hash = mm_hash
            slot.ready = False
            self._by_hash[mm_hash] = slot
        slot.users += 1
        return slot

    def release(self, slot: FeatureSlot) -> None:
        slot.users -= 1
        if slot.users == 0:
            self._by_hash.pop(slot.mm_hash, None)
            self._vacant.append(slot)


class State(enum.Enum):
    WAITING = "waiting"
    ENCODING = "encoding"
    RUNNING = "running"
    DONE = "done"


@dataclass
class MMItem:
    kind: str
    payload: bytes

    def digest(self) -> str:
        return hashlib.blake2b(self.payload, digest_size=16).hexdigest()


@dataclass
class MMRequest:
    rid: str
    items: list[MMItem]
    slots: list[FeatureSlot] = field(default_factory=list)
    draft_slot: FeatureSlot | None = None
    audio_slot: FeatureSlot | None = None
    state: State = State.WAITING
    steps_left: int = 16


class MMScheduler:
    def __init__(self, cache: EncoderCache, encoder: torch.nn.Module, budget: int = 4) -> None:
        self.cache = cache
        self.encoder = encoder
        self.budget = budget
        self.waiting: deque[MMRequest] = deque()
        self.running: dict[str, MMRequest] = {}

    def add(self, req: MMRequest) -> None:
        self.waiting.append(req)

    def _bind(self, req: MMRequest) -> bool:
        got: list[FeatureSlot] = []
        for item in req.items:
            slot = self.cache.acquire(item.digest())  # clean: rolled back on a miss, else moved to req.slots
            if slot is None:
                for s in got:
                    self.cache.release(s)
                return False
            got.append(slot)
        req.slots.extend(got)
        return True

    def _bind_audio(self, req: MMRequest) -> bool:
        track = next((i for i in req.items if i.kind == "audio"), None)
        if track is None:
            return True
        slot = self.cache.acquire("pcm:" + track.digest())  # leak: audio_slot is forgotten by finish
        if slot is None:
            return False
        req.audio_slot = slot
        return True

    def _bind_draft(self, req: MMRequest) -> None:
        if req.items:
            req.draft_slot = self.cache.acquire("draft:" + req.items[0].digest())  # clean: released in both finish and abort

    def admit(self) -> list[MMRequest]:
        admitted: list[MMRequest] = []
        while self.waiting and len(admitted) < self.budget:
            req = self.waiting[0]
            if not self._bind(req):  # clean: near miss, undone by _unbind when the audio is missing
                break
            if not self._bind_audio(req):
                self._unbind(req)
                break
            self._bind_draft(req)
            self.waiting.popleft()
            req.state = State.ENCODING
            self.running[req.rid] = req
            admitted.append(req)
        return admitted

    def _unbind(self, req: MMRequest) -> None:
        while req.slots:
            self.cache.release(req.slots.pop())

    def encode(self, reqs: list[MMRequest]) -> None:
        for req in reqs:
            for item, slot in zip(req.items, req.slots):
                if slot.ready:
                    continue
                pixels = torch.frombuffer(bytearray(item.payload), dtype=torch.uint8).cuda()
                self.cache.features[slot.idx].copy_(self.encoder(pixels))
                slot.ready = True
            req.state = State.RUNNING

    def step(self) -> list[str]:
        done = []
        for req in list(self.running.values()):
            req.steps_left -= 1
            if req.steps_left <= 0:
                self.finish(req)
                done.append(req.rid)
        return done

    def finish(self, req: MMRequest) -> None:
        self._unbind(req)
        if req.draft_slot is not None:
            self.cache.release(req.draft_slot)
            req.draft_slot = None
        req.state = State.DONE
        self.running.pop(req.rid, None)

    def abort(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            self.waiting = deque(r for r in self.waiting if r.rid != rid)
            return
        self._unbind(req)
        for slot in (req.draft_slot, req.audio_slot):
            if slot is not None:
                self.cache.release(slot)
        req.draft_slot = req.audio_slot = None
        req.state = State.DONE

    def append_item(self, rid: str, item: MMItem) -> bool:
        slot = self.cache.acquire(item.digest())  # leak: a request that is gone returns False with the slot still used
        if slot is None:
            return False
        req = self.running.get(rid)
        if req is None:
            return False
        req.items.append(item)
        req.slots.append(slot)
        return True

    def replace_item(self, rid: str, pos: int, item: MMItem) -> bool:
        req = self.running.get(rid)
        if req is None or pos >= len(req.slots):
            return False
        slot = self.cache.acquire(item.digest())  # clean: near miss, the old slot is released before the new one takes its place
        if slot is None:
            return False
        old = req.slots[pos]
        self.cache.release(old)
        req.items[pos], req.slots[pos] = item, slot
        return True

    def fork(self, rid: str, new_rid: str) -> MMRequest | None:
        parent = self.running.get(rid)
        if parent is None:
            return None
        child = MMRequest(new_rid, list(parent.items), state=State.RUNNING, steps_left=parent.steps_left)
        for item in parent.items:
            slot = self.cache.acquire(item.digest())  # leak: on a miss the slots got so far stay with the dropped child
            if slot is None:
                return None
            child.slots.append(slot)
        self.running[new_rid] = child
        return child


def copy_features(cache: EncoderCache, item: MMItem, out: torch.Tensor) -> bool:
    slot = cache.acquire(item.digest())  # leak: features not ready, returns without release
    if slot is None:
        return False
    if not slot.ready:
        return False
    out.copy_(cache.features[slot.idx])
    cache.release(slot)
    return True
