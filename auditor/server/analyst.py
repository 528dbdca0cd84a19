"""The process that audits: the server stays awake while it works, and survives whatever it dies of."""

import contextlib
import multiprocessing
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from auditor.server.desk import Withdrawal, serve
from auditor.server.workplace import Answer, Order

_context = multiprocessing.get_context("spawn")  # a fork would take the server's threads and streams along


class AnalystDied(Exception):
    """The process ended over an order; the message says how."""


class Analyst:
    """Asks one question after the other of a process that remembers its last answers."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._sending = threading.Lock()
        self._number = 0

    def number(self) -> int:
        """For the next order, so that it can be withdrawn."""
        self._number += 1
        return self._number

    def ask(self, order: Order) -> Answer:
        """Blocks until there is an answer. Raises AnalystDied; the next question starts a new process."""
        pipe = self._start() if self._pipe is None else self._pipe
        try:
            with self._sending:
                pipe.send(order)
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            code = self.stop()
            raise AnalystDied(f"the audit ended unexpectedly (exit code {code})") from error
        if isinstance(answer, BaseException):
            raise AnalystDied(f"internal error: {type(answer).__name__}: {answer}") from answer
        assert isinstance(answer, Answer)
        return answer

    def withdraw(self, number: int) -> None:
        """Whoever waits for the answer to that order gets an outdated one, and soon."""
        pipe = self._pipe
        if pipe is not None:
            with self._sending, contextlib.suppress(OSError):  # who waits is told of the death
                pipe.send(Withdrawal(number))

    def stop(self) -> int | None:
        """End the process, if there is one, whatever it is doing; its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        process.terminate()  # who waits for its answer sees the pipe end
        process.join()
        pipe.close()
        return process.exitcode

    def _start(self) -> Connection:
        ours, theirs = _context.Pipe()
        self._process = _context.Process(target=serve, args=(theirs,), daemon=False)
        self._process.start()
        theirs.close()
        self._pipe = ours
        return ours
