"""Device frames that hold the weights of one expert each."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple


@dataclass(eq=False)
class Frame:
    number: int
    expert: Tuple[int, int] = (-1, -1)
    users: int = 0


class FramePool:
    def __init__(self, count: int) -> None:
        self._vacant: List[Frame] = [Frame(i) for i in range(count)]

    def grab(self) -> Optional[Frame]:
        return self._vacant.pop() if self._vacant else None  # clean: returned to the caller

    def grab_for(self, layer: int, expert: int) -> Optional[Frame]:
        frame = self.grab()  # clean: labelled with the expert and returned
        if frame is not None:
            frame.expert = (layer, expert)
        return frame

    def give_up(self, frame: Frame) -> None:
        frame.expert = (-1, -1)
        frame.users = 0
        self._vacant.append(frame)
