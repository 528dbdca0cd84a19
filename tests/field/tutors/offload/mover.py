"""Moves KV pages between tiers."""
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Callable, Optional

from .tiers import Tier, TieredStore

Place = tuple[Tier, int]


@dataclass
class PagedSequence:
    places: list[Place] = field(default_factory=list)
    cold: dict[int, Place] = field(default_factory=dict)


class PageMover:
    def __init__(self, store: TieredStore, copy: Callable[[Place, Place], bool]) -> None:
        self.store = store
        self.copy = copy

    def swap_out(self, seq: PagedSequence) -> bool:
        for index, place in enumerate(seq.places):
            if place[0] is Tier.HOST:
                continue
            host = self.store.obtain(Tier.HOST)  # clean: near miss, replaces the entry whose GPU page is disposed
            if host is None:
                return False
            self.copy(place, host)
            seq.places[index] = host
            self.store.dispose(place)
        return True

    def swap_in(self, seq: PagedSequence) -> bool:
        for index, place in enumerate(seq.places):
            if place[0] is Tier.GPU:
                continue
            gpu = self.store.obtain(Tier.GPU)  # leak: a failed copy returns with the GPU page in hand
            if gpu is None:
                return False
            if not self.copy(place, gpu):
                return False
            seq.places[index] = gpu
            self.store.dispose(place)
        return True

    def back_up(self, seq: PagedSequence) -> int:
        copied = 0
        for index, place in enumerate(seq.places):
            if index in seq.cold:
                continue
            host = self.store.obtain(Tier.HOST)  # clean: near miss, failed copies are disposed, others freed by drop
            if host is None:
                break
            if not self.copy(place, host):
                self.store.dispose(host)
                continue
            seq.cold[index] = host
            copied += 1
        return copied

    def refresh(self, seq: PagedSequence, index: int) -> None:
        host = self.store.obtain(Tier.HOST)  # leak: overwrites the earlier cold copy of this index
        if host is not None:
            self.copy(seq.places[index], host)
            seq.cold[index] = host

    def drop(self, seq: PagedSequence) -> None:
        for place in seq.places:
            self.store.dispose(place)
        for place in seq.cold.values():
            self.store.dispose(place)
        seq.places, seq.cold = [], {}

    def append(self, seq: PagedSequence) -> bool:
        place = self.store.obtain_any()  # clean: in seq.places, drop disposes
        if place is None:
            return False
        seq.places.append(place)
        return True

    def clone(self, seq: PagedSequence) -> Optional[PagedSequence]:
        with ExitStack() as undo:
            twin = PagedSequence()
            for place in seq.places:
                target = self.store.obtain_any()  # clean: near miss, undo disposes unless pop_all keeps it
                if target is None:
                    return None
                undo.callback(self.store.dispose, target)
                self.copy(place, target)
                twin.places.append(target)
            undo.pop_all()
            return twin

    def clone_checked(self, seq: PagedSequence) -> Optional[PagedSequence]:
        with ExitStack() as undo:
            twin = PagedSequence()
            for place in seq.places:
                target = self.store.obtain_any()  # leak: pop_all runs before the last check returns None
                if target is None:
                    return None
                undo.callback(self.store.dispose, target)
                twin.places.append(target)
            undo.pop_all()
            if not all(self.copy(a, b) for a, b in zip(seq.places, twin.places)):
                return None
            return twin
