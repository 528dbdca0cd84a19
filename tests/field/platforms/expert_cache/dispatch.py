"""Routes token groups to the experts they chose."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Tuple

from .cache import ExpertCache, Key
from .store import Frame


@dataclass
class TokenGroup:
    key: Key
    tokens: List[int]
    frame: Optional[Frame] = None


@dataclass
class Dispatcher:
    cache: ExpertCache
    kernel: Callable[[Frame, List[int]], List[float]]
    held: Dict[Key, Frame] = field(default_factory=dict)

    def run_group(self, group: TokenGroup) -> List[float]:
        frame = self.cache.use(group.key)  # clean: done after the kernel
        if frame is None:
            return []
        result = self.kernel(frame, group.tokens)
        self.cache.done(frame)
        return result

    def run_top2(self, first: Key, second: Key, tokens: List[int]) -> Optional[List[float]]:
        a = self.cache.use(first)  # leak: stays in use when the second expert is not to be had
        if a is None:
            return None
        b = self.cache.use(second)  # clean: near miss, done together with the first
        if b is None:
            return None
        left, right = self.kernel(a, tokens), self.kernel(b, tokens)
        for frame in (a, b):
            self.cache.done(frame)
        return [x + y for x, y in zip(left, right)]

    def attach(self, groups: List[TokenGroup]) -> List[TokenGroup]:
        """Give each group its frame; groups without one are left for later."""
        later: List[TokenGroup] = []
        for group in groups:
            if group.frame is None:
                group.frame = self.cache.use(group.key)  # clean: near miss, kept on the group, detach ends the use
            if group.frame is None:
                later.append(group)
        return later

    def detach(self, groups: List[TokenGroup]) -> None:
        for group in groups:
            frame, group.frame = group.frame, None
            if frame is not None:
                self.cache.done(frame)

    def hold(self, key: Key) -> bool:
        frame = self.cache.use(key)  # leak: a key held already gains a use for the same entry, and let_go ends one
        if frame is None:
            return False
        self.held[key] = frame
        return True

    def let_go(self, key: Key) -> None:
        frame = self.held.pop(key, None)
        if frame is not None:
            self.cache.done(frame)

    def warm(self, keys: List[Key]) -> List[int]:
        ready = [self.cache.use(key) for key in keys]  # leak: only the frame numbers outlive the list
        return [frame.number for frame in ready if frame is not None]
