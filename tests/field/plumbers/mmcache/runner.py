"""Encodes the items of a request and keeps them attached while it prefills."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List

from .cache import EncoderCache, Entry


@dataclass
class MMRequest:
    rid: str
    items: Dict[str, int]
    attached: List[Entry] = field(default_factory=list)


Encode = Callable[[str, Entry], bool]


class EncoderRunner:
    def __init__(self, cache: EncoderCache, encode: Encode) -> None:
        self.cache = cache
        self.encode = encode
        self.live: Dict[str, MMRequest] = {}

    def attach_all(self, req: MMRequest) -> bool:
        for key, rows in req.items.items():
            entry = self.cache.get_or_create(key, rows)  # clean: near miss, detached on shortage through the request
            if entry is None:
                self.detach_all(req)
                return False
            req.attached.append(entry)
        self.live[req.rid] = req
        return True

    def detach_all(self, req: MMRequest) -> None:
        while req.attached:
            self.cache.detach(req.attached.pop())
        self.live.pop(req.rid, None)

    def run(self, req: MMRequest) -> int:
        """Encodes what is not cached; returns the number of encoder calls."""
        calls = 0
        for key, rows in req.items.items():
            hit = self.cache.attach(key)  # leak: a hit is counted and skipped without detach
            if hit is not None:
                continue
            entry = self.cache.create(key, rows)  # clean: goes to attached, detach_all detaches
            if entry is None:
                break
            calls += 1
            self.encode(key, entry)
            req.attached.append(entry)
        return calls

    def is_ready(self, keys: List[str]) -> bool:
        return all(self.cache.attach(k) is not None for k in keys)  # leak: tested only, the reader count stays

    def prewarm(self, items: Dict[str, int]) -> int:
        done = 0
        for key, rows in items.items():
            entry = self.cache.get_or_create(key, rows)  # leak: a refused encode leaves the loop attached
            if entry is None:
                continue
            if not self.encode(key, entry):
                break
            done += 1
            self.cache.detach(entry)
        return done
