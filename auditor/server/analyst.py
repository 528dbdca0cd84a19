"""The process that audits: the server stays awake while it works, and survives whatever it dies of."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from auditor.server.workplace import Answer, Order, Workplace

_context = multiprocessing.get_context("spawn")  # a fork would take the server's threads and streams along


class AnalystDied(Exception):
    """The process ended over an order; the message says how."""


class Analyst:
    """Asks one question after the other of a process that remembers its last answers."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, order: Order) -> Answer:
        """Blocks until there is an answer. Raises AnalystDied; the next question starts a new process."""
        pipe = self._start() if self._pipe is None else self._pipe
        try:
            pipe.send(order)
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            code = self.stop()
            raise AnalystDied(f"the audit ended unexpectedly (exit code {code})") from error
        if isinstance(answer, BaseException):
            raise AnalystDied(f"internal error: {type(answer).__name__}: {answer}") from answer
        assert isinstance(answer, Answer)
        return answer

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


def serve(pipe: Connection) -> None:
    """Answer orders until the other end is closed. Standard output belongs to the server's client."""
    os.dup2(sys.stderr.fileno(), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    workplaces: dict[tuple[str, tuple[str, ...]], Workplace] = {}
    while True:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):
            return
        place = workplaces.setdefault(
            (order.start, order.paths), Workplace(order.start, order.paths, os.cpu_count() or 1)
        )
        try:
            pipe.send(place.check(order.documents))
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # said in the editor, and the next keystroke is another chance
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
