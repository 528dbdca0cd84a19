"""Actors fill segments and pass them to the bus."""
import logging
from typing import Callable, List, Optional, Tuple

import numpy as np

from replaybus.segments import SealedSegment, Segment, SegmentStore, StoreFull
from replaybus.transport import Bus, BusClosed

log = logging.getLogger("replaybus.actor")

StepFn = Callable[[], Tuple[np.ndarray, float, bool]]


class Actor:
    def __init__(self, name: str, store: SegmentStore, bus: Bus, step: StepFn) -> None:
        self.name = name
        self.store = store
        self.bus = bus
        self.step = step
        self._open: Optional[Segment] = None

    # -- the normal loop ----------------------------------------------------
    def run_once(self) -> bool:
        """One environment step into the open segment."""
        if self._open is None:
            try:
                self._open = self.store.check_out(self.name)  # clean: only when none is open; pushed when full, else close unrefs
            except StoreFull:
                return False
        obs, rew, done = self.step()
        if self._open.add(obs, rew) or done:
            seg, self._open = self._open, None
            self.bus.push(seg)
        return True

    def close(self) -> None:
        if self._open is not None:
            self.store.unref(self._open)
            self._open = None

    # -- whole episodes -------------------------------------------------------
    def episode(self) -> int:
        seg = self.store.check_out(self.name)  # leak: a refused offer is logged and the reference is still ours
        self._fill(seg)
        if not self.bus.offer(seg):
            log.info("%s: bus is full, episode dropped", self.name)
            return 0
        return seg.length

    def episode_pushed(self) -> int:
        seg = self.store.check_out(self.name)  # clean: push takes the reference even when it raises
        self._fill(seg)
        length = seg.length
        try:
            self.bus.push(seg)
        except BusClosed:
            return 0
        return length

    def episode_offered(self, tries: int = 3) -> bool:
        seg = self.store.check_out(self.name)  # clean: accepted within the tries or unreffed after them
        self._fill(seg)
        for _ in range(tries):
            if self.bus.offer(seg):
                break
        else:
            self.store.unref(seg)
            return False
        return True

    def _fill(self, seg: Segment) -> None:
        done = False
        while not done and not seg.sealed:
            obs, rew, done = self.step()
            seg.add(obs, rew)

    # -- variants ---------------------------------------------------------------
    def long_episode(self) -> List[Segment]:
        """An episode over several segments; the caller unrefs them all."""
        parts = [self.store.check_out(self.name)]  # leak: StoreFull in mid episode loses the parts so far
        done = False
        while not done:
            obs, rew, done = self.step()
            if parts[-1].add(obs, rew) and not done:
                parts.append(self.store.check_out(self.name))  # leak: as the first, lost when a later one is refused
        return parts

    def long_episode_trimmed(self) -> List[Segment]:
        """Like :meth:`long_episode`, cut short when the store is full."""
        parts: List[Segment] = []
        done = False
        while not done:
            if not parts or parts[-1].sealed:
                try:
                    parts.append(self.store.check_out(self.name))  # clean: the list so far is returned on StoreFull as well
                except StoreFull:
                    break
            obs, rew, done = self.step()
            parts[-1].add(obs, rew)
        return parts

    def append_shared(self, tag: str, obs: np.ndarray, rew: float) -> bool:
        """Write into the segment that several actors fill together."""
        seg = self.store.check_out_tagged(tag)  # leak: a sealed segment raises in add and the handler keeps the reference
        try:
            full = seg.add(obs, rew)
        except SealedSegment:
            return False
        if full:
            self.bus.push(seg)
        else:
            self.store.unref(seg)
        return True

    def copy_of(self, seg: Segment) -> Optional[Segment]:
        with self.store.borrowed(seg) as src:  # clean: context manager
            dup = self.store.check_out_idle(margin=4)  # clean: returned when it was copied, unreffed when it is empty
            if dup is None:
                return None
            for i in range(src.length):
                dup.add(src.obs[i], float(src.rew[i]))
            if dup.length == 0:
                self.store.unref(dup)
                return None
            return dup
