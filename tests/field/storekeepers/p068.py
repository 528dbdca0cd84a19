from typing import List, NamedTuple, Optional


class Window(NamedTuple):
    slot: int
    begin: float
    end: float


class AntennaSlots:
    def __init__(self, n: int):
        self._idle = list(range(n))

    def allocate(self) -> int:
        return self._idle.pop(0)

    def deallocate(self, slot: int) -> None:
        self._idle.append(slot)


_plan: List[Window] = []
_tracking: Optional[Window] = None
_slots = AntennaSlots(12)


def schedule(begin: float, end: float) -> bool:
    if end <= begin:
        return False
    slot = _slots.allocate()  # leak: coalesce joins windows and keeps the slot of the first alone
    _plan.append(Window(slot, begin, end))
    _plan.sort(key=lambda w: w.begin)
    return True


def coalesce() -> int:
    joined: List[Window] = []
    for window in _plan:
        if joined and joined[-1].end >= window.begin:
            last = joined[-1]
            joined[-1] = last._replace(end=max(last.end, window.end))
        else:
            joined.append(window)
    saved = len(_plan) - len(joined)
    _plan[:] = joined
    return saved


def track(now: float) -> Optional[Window]:
    """Take over the next window and give back the one before."""
    global _tracking
    if _plan and _plan[0].begin <= now:
        if _tracking is not None:
            _slots.deallocate(_tracking.slot)
        _tracking = _plan.pop(0)
    return _tracking


def end_of_day() -> int:
    global _tracking
    count = len(_plan)
    while _plan:
        _slots.deallocate(_plan.pop().slot)
    if _tracking is not None:
        _slots.deallocate(_tracking.slot)
        _tracking = None
    return count


def measure_noise(receive) -> float:
    slot = _slots.allocate()  # clean: deallocated below
    level = receive(slot)
    _slots.deallocate(slot)
    return level


class Beacon:
    _slot: Optional[int] = None

    @classmethod
    def on(cls) -> int:
        if cls._slot is None:
            cls._slot = _slots.allocate()  # clean: off gives it back
        return cls._slot

    @classmethod
    def off(cls) -> None:
        if cls._slot is not None:
            _slots.deallocate(cls._slot)
            cls._slot = None
