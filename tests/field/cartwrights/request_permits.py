"""Admission permits for the front end, with priorities and borrowing."""

import itertools
import logging
import threading
from collections import deque
from functools import wraps
from typing import Callable, Deque, Dict, List, Optional, Tuple

logger = logging.getLogger("frontend.permits")


class Overloaded(Exception):
    pass


class PermitJar:
    def __init__(self, size: int) -> None:
        self._tokens: Deque[int] = deque(range(size))
        self._lock = threading.Lock()

    def dip(self) -> Optional[int]:
        with self._lock:
            return self._tokens.popleft() if self._tokens else None  # clean: returned

    def dip_or_raise(self, floor: int = 0) -> int:
        """A permit, as long as more than ``floor`` would remain."""
        with self._lock:
            if not self._tokens:
                raise Overloaded("no permits")
            token = self._tokens.popleft()  # leak: below the floor it raises with the token already off the deque
            if len(self._tokens) < floor:
                raise Overloaded("reserved for high priority")
            return token

    def drop_in(self, token: int) -> None:
        with self._lock:
            self._tokens.append(token)


class Lane:
    """Permits of one priority class; may borrow from a lower lane."""

    def __init__(self, jar: PermitJar, lower: Optional["Lane"] = None) -> None:
        self.jar = jar
        self.lower = lower
        self._origin: Dict[int, Tuple[PermitJar, int]] = {}
        self._serial = itertools.count(1)

    def enter(self) -> Optional[int]:
        token = self.jar.dip()  # clean: noted with its jar in the origin table and returned
        source = self.jar
        if token is None and self.lower is not None:
            token = self.lower.jar.dip()  # clean: noted with the lower jar, to which leave brings it back
            source = self.lower.jar
        if token is None:
            return None
        handle = next(self._serial)
        self._origin[handle] = (source, token)
        return handle

    def leave(self, handle: int) -> None:
        source, token = self._origin.pop(handle)
        source.drop_in(token)


def guarded(lane: Lane) -> Callable:
    """Decorator: run the function under a permit of ``lane``."""

    def deco(fn: Callable) -> Callable:
        @wraps(fn)
        def inner(*args, **kwargs):
            handle = lane.enter()  # clean: a None raises, any other is left in the finally
            if handle is None:
                raise Overloaded(fn.__name__)
            try:
                return fn(*args, **kwargs)
            finally:
                lane.leave(handle)

        return inner

    return deco


class Frontend:
    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._held: List[int] = []

    def _validate(self, body: dict) -> str:
        if "prompt" not in body:
            raise ValueError("prompt is required")
        return body["prompt"]

    def handle(self, body: dict) -> str:
        permit = self.lane.enter()  # leak: for a body without prompt the handler returns an error string, and the leave was skipped
        if permit is None:
            return "429"
        try:
            prompt = self._validate(body)
            self.lane.leave(permit)
            return prompt.upper()
        except ValueError as exc:
            return f"400 {exc}"

    def warm_up(self, count: int) -> int:
        while len(self._held) < count:
            permit = self.lane.enter()  # clean: held in the list until cool_down, a None ends the loop
            if permit is None:
                break
            self._held.append(permit)
        return len(self._held)

    def cool_down(self) -> None:
        while self._held:
            self.lane.leave(self._held.pop())
