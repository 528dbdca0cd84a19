"""Expert cache with use counts; unused experts are evicted oldest first."""
from __future__ import annotations

from collections import OrderedDict
from typing import Callable, Dict, List, Optional, Tuple

from .store import Frame, FramePool

Key = Tuple[int, int]


class ExpertCache:
    def __init__(self, frames: FramePool, load: Callable[[Key, Frame], bool]) -> None:
        self.frames = frames
        self.load = load
        self._entries: "OrderedDict[Key, Frame]" = OrderedDict()
        self._staged: Dict[Key, Frame] = {}

    def _evict_one(self) -> bool:
        for key, frame in self._entries.items():
            if frame.users == 0:
                del self._entries[key]
                self.frames.give_up(frame)
                return True
        return False

    def _frame_for(self, key: Key) -> Optional[Frame]:
        frame = self.frames.grab_for(*key)  # clean: near miss, the second try is made only when this one had none
        if frame is None and self._evict_one():
            frame = self.frames.grab_for(*key)  # clean: returned to the caller
        return frame

    def use(self, key: Key) -> Optional[Frame]:
        """The frame of `key` with its use count raised; pair with `done`."""
        frame = self._entries.get(key)
        if frame is None:
            frame = self._frame_for(key)  # leak: weights that fail to load return None and drop the frame
            if frame is None or not self.load(key, frame):
                return None
            self._entries[key] = frame
        frame.users += 1  # clean: the use belongs to the caller
        self._entries.move_to_end(key)
        return frame

    def done(self, frame: Frame) -> None:
        frame.users -= 1

    def stage(self, key: Key) -> bool:
        """Load ahead of use without entering the cache."""
        if key in self._staged or key in self._entries:
            return True
        frame = self._frame_for(key)  # clean: near miss, given up on a failed load, else staged until promote or unstage_all
        if frame is None:
            return False
        if not self.load(key, frame):
            self.frames.give_up(frame)
            return False
        self._staged[key] = frame
        return True

    def promote(self, key: Key) -> bool:
        frame = self._staged.pop(key, None)
        if frame is None:
            return False
        if key in self._entries:
            self.frames.give_up(frame)
        else:
            self._entries[key] = frame
        return True

    def unstage_all(self) -> None:
        for frame in self._staged.values():
            self.frames.give_up(frame)
        self._staged.clear()

    def preload(self, keys: List[Key]) -> int:
        count = 0
        for key in keys:
            frame = self.frames.grab_for(*key)  # leak: a key that is in the cache already is passed over with the frame grabbed
            if frame is None:
                break
            if key in self._entries:
                continue
            if self.load(key, frame):
                self._entries[key] = frame
                count += 1
            else:
                self.frames.give_up(frame)
        return count
