"""Admission control for the inference gateway: plain functions over a module-level table of tickets."""
from __future__ import annotations

import functools
import logging
import threading
import time
from contextlib import closing
from typing import Any, Callable, Optional

log = logging.getLogger("gateway.admission")

_LIMITS = {"chat": 16, "embed": 64, "audio": 4}
_guard = threading.Condition()
_inside: dict[int, str] = {}
_numbers = 0
_parked: dict[str, int] = {}
_by_request: dict[str, list[int]] = {}


def admit(lane: str) -> Optional[int]:
    """A ticket number for the lane, or None where it is full."""
    global _numbers
    with _guard:
        if sum(1 for name in _inside.values() if name == lane) >= _LIMITS[lane]:
            return None
        _numbers += 1
        _inside[_numbers] = lane
        return _numbers


def dismiss(ticket: int) -> None:
    with _guard:
        _inside.pop(ticket, None)
        _guard.notify_all()


def admit_wait(lane: str, patience: float) -> Optional[int]:
    end = time.monotonic() + patience
    while True:
        ticket = admit(lane)  # clean: handed to the caller
        if ticket is not None:
            return ticket
        left = end - time.monotonic()
        if left <= 0:
            return None
        with _guard:
            _guard.wait(min(left, 0.1))


class Pass:
    """Object form of a ticket, for use with closing()."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.ticket = admit(lane)  # clean: near miss, close() dismisses it

    @property
    def valid(self) -> bool:
        return self.ticket is not None

    def close(self) -> None:
        if self.ticket is not None:
            dismiss(self.ticket)
            self.ticket = None


def limited(lane: str) -> Callable:
    def wrap(handler: Callable) -> Callable:
        @functools.wraps(handler)
        def call(*args: Any, **kwargs: Any) -> tuple[int, Any]:
            ticket = admit(lane)  # clean: dismissed in finally
            if ticket is None:
                return 503, None
            try:
                return 200, handler(*args, **kwargs)
            finally:
                dismiss(ticket)

        return call

    return wrap


def limited_json(lane: str) -> Callable:
    """For handlers which may answer None."""

    def wrap(handler: Callable[[dict], Optional[dict]]) -> Callable[[dict], tuple[int, dict]]:
        @functools.wraps(handler)
        def call(body: dict) -> tuple[int, dict]:
            ticket = admit_wait(lane, 0.5)  # leak: a handler that answers None ends in 404 with the ticket inside
            if ticket is None:
                return 503, {"error": "busy"}
            answer = handler(body)
            if answer is None:
                return 404, {"error": "unknown"}
            dismiss(ticket)
            return 200, answer

        return call

    return wrap


def infer(lane: str, body: dict, run: Callable[[dict], Any]) -> tuple[int, Any]:
    with closing(Pass(lane)) as ticket:  # clean: closing() calls close
        if not ticket.valid:
            return 503, None
        if "model" not in body:
            return 400, None
        return 200, run(body)


def estimate(lane: str, body: dict) -> float:
    ticket = Pass(lane)  # leak: asked for validity only, close is never called
    if ticket.valid:
        return 0.1 * len(body)
    return 1.0 + 0.1 * len(body)


def infer_upgrade(body: dict, run: Callable[[str, dict], Any]) -> Any:
    ticket = admit("embed")  # leak: the ticket of the better lane takes its name
    if ticket is None:
        return None
    lane = "embed"
    if body.get("stream"):
        better = admit("chat")  # clean: near miss, becomes ticket, which is dismissed
        if better is not None:
            ticket, lane = better, "chat"
    result = run(lane, body)
    dismiss(ticket)
    return result


def infer_promote(body: dict, run: Callable[[str, dict], Any]) -> Any:
    ticket = admit("embed")  # clean: near miss, dismissed before the better one takes its name
    if ticket is None:
        return None
    lane = "embed"
    if body.get("priority", 0) > 5:
        better = admit("chat")  # clean: near miss, becomes ticket, which is dismissed
        if better is not None:
            dismiss(ticket)
            ticket, lane = better, "chat"
    result = run(lane, body)
    dismiss(ticket)
    return result


def in_background(body: dict, run: Callable[[dict], Any]) -> bool:
    ticket = admit("audio")  # clean: near miss, the thread's function dismisses it
    if ticket is None:
        return False

    def work(number: int) -> None:
        try:
            run(body)
        finally:
            dismiss(number)

    threading.Thread(target=work, args=(ticket,), daemon=True).start()
    return True


def open_request(request: str, lanes: list[str]) -> bool:
    """All lanes or none."""
    if request in _by_request:
        return False
    tickets: list[int] = []
    for lane in lanes:
        ticket = admit(lane)  # clean: near miss, rolled back here or dismissed by close_request
        if ticket is None:
            for other in tickets:
                dismiss(other)
            return False
        tickets.append(ticket)
    _by_request[request] = tickets
    return True


def close_request(request: str) -> int:
    tickets = _by_request.pop(request, [])
    for ticket in tickets:
        dismiss(ticket)
    return len(tickets)


def hold_for(session: str, lane: str) -> bool:
    ticket = admit(lane)  # leak: a second hold of one session overwrites the ticket of the first
    if ticket is None:
        return False
    _parked[session] = ticket
    return True


def end_hold(session: str) -> None:
    ticket = _parked.pop(session, None)
    if ticket is not None:
        dismiss(ticket)


def drain(lane: str, bodies: list[dict], run: Callable[[dict], bool]) -> int:
    done = 0
    for body in bodies:
        ticket = admit_wait(lane, 2.0)  # leak: a body without a prompt continues with its ticket inside
        if ticket is None:
            break
        if not body.get("prompt"):
            log.info("skip an empty body")
            continue
        done += run(body)
        dismiss(ticket)
    return done
