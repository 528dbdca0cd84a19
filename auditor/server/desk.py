"""The analyst's side of the pipe: orders in, answers out, and what is done while there is no order."""

import contextlib
import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from auditor.server.recurring import Outdated
from auditor.server.workplace import Answer, Order, Workplace

LOOK_EVERY = 0.02
"""Seconds between two looks at whether the order at work is still wanted."""
COLLECT_EVERY = 4
"""Whole audits between two collections of garbage, each of which looks at everything that is remembered."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Nobody waits any more for the answers to orders up to this number."""

    number: int


def serve(pipe: Connection) -> None:
    """Answer orders until the other end is closed. Standard output belongs to the server's client."""
    os.dup2(sys.stderr.fileno(), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # it would stop to look at every syntax tree of the project, at any keystroke
    with contextlib.suppress(EOFError, OSError):  # the server is gone
        Desk(pipe).work()


class Desk:
    """The pipe's other end: orders come in, and words that one of them has been withdrawn."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._places: dict[tuple[str, tuple[str, ...]], Workplace] = {}
        self._waiting: Order | None = None  # came while nobody waited for an answer
        self._working_on = 0
        self._withdrawn = 0
        self._look_again = 0.0
        self._whole = 0

    def work(self) -> None:
        while True:
            order, self._waiting = self._waiting or self._next(), None
            self._working_on = order.number
            answer = self._answer(order)
            self._pipe.send(answer)
            self._working_on = 0
            if isinstance(answer, Answer) and not answer.outdated:
                self._rest(order, answer)

    def _next(self) -> Order:
        while True:
            message: Order | Withdrawal = self._pipe.recv()
            if isinstance(message, Order):
                return message
            self._withdrawn = message.number

    def _answer(self, order: Order) -> Answer | RuntimeError:
        try:
            if order.number <= self._withdrawn:
                raise Outdated
            return self._place_of(order).check(order.documents, glance=order.glance)
        except Outdated:
            return Answer(settled=False, outdated=True)
        except Exception as error:  # said in the editor, and the next keystroke is another chance
            return RuntimeError(f"{type(error).__name__}: {error}")

    def _place_of(self, order: Order) -> Workplace:
        key = (order.start, order.paths)
        if key not in self._places:
            self._places[key] = Workplace(*key, os.cpu_count() or 1, self._watch)
        return self._places[key]

    def _watch(self) -> None:
        """Raise Outdated if the order at work is withdrawn, or, at rest, if there is another one."""
        now = time.monotonic()
        if now < self._look_again:
            return
        self._look_again = now + LOOK_EVERY
        while self._waiting is None and self._pipe.poll():
            message: Order | Withdrawal = self._pipe.recv()
            if isinstance(message, Order):
                self._waiting = message
            else:
                self._withdrawn = message.number
        if self._waiting is not None or (self._working_on and self._withdrawn >= self._working_on):
            raise Outdated

    def _rest(self, order: Order, answer: Answer) -> None:
        """Until the next order: make the next glance possible, and now and then collect garbage."""
        with contextlib.suppress(Outdated):
            self._watch()
            if order.documents:
                self._place_of(order).rest()
            self._whole += answer.settled
            if self._whole >= COLLECT_EVERY:
                self._whole = 0
                gc.unfreeze()
                gc.collect()
        gc.freeze()
