"""Batch queue of the evaluation cluster: seats, dispatcher, runners, interactive sessions."""
import queue

from .dispatcher import Dispatcher
from .seats import SeatBook
from .sessions import SessionManager


def build(plan: dict[str, int], homes: str) -> tuple[Dispatcher, SessionManager]:
    book = SeatBook(plan)
    return Dispatcher(book, queue.PriorityQueue()), SessionManager(book, homes)
