"""Work spread over processes that may die: a dead worker costs the item that killed it, never the rest."""

import contextlib
import gc
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
CHUNKS_PER_WORKER = 32  # enough to even out slow chunks, few enough that messages cost nothing

if sys.platform == "linux":
    _context = multiprocessing.get_context("fork")  # starts without importing everything again
else:
    _context = multiprocessing.get_context("spawn")


class WorkFailed(Exception):
    """`work` raised, which it must not; the message is its traceback."""


@dataclass(frozen=True, slots=True)
class Died:
    """Stands in for the result of an item whose worker died over it (a negative code is a signal)."""

    exit_code: int | None


def run_all(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int, first: Sequence[Item] = ()
) -> Iterator[tuple[Item, Result | Died]]:
    """Yield every item with `work(item)`, in no particular order, computed in `jobs` processes.

    Those that take long come `first`, each by itself. `work` must be importable by name and may not raise:
    what goes wrong belongs into its result.
    """
    waiting = [*_chunks(items, jobs), *([item] for item in first)]  # taken from the end
    crew: dict[Connection, _Worker[Item, Result]] = {}
    try:
        while waiting or crew:
            while waiting and len(crew) < jobs:
                worker = _Worker(work, waiting.pop())
                crew[worker.pipe] = worker
            for pipe in wait(list(crew)):
                worker = crew[pipe]  # type: ignore[index]  # wait() returns what it was given
                results = worker.answer()
                done = worker.chunk
                if results is None or not waiting:
                    del crew[worker.pipe]
                    code = worker.stop()
                else:
                    worker.give(waiting.pop())
                if results is not None:
                    yield from zip(done, results, strict=True)
                elif len(done) == 1:
                    yield done[0], Died(code)
                else:  # one of them did it: each gets its own turn
                    waiting.extend([item] for item in done)
    finally:
        for worker in crew.values():
            worker.stop()


def _chunks(items: Sequence[Item], jobs: int) -> list[Sequence[Item]]:
    """Slices of `items`, striped: neighbours tend to be of a size, and so go to different workers."""
    count = min(len(items), jobs * CHUNKS_PER_WORKER)
    return [items[start::count] for start in range(count)]


class _Worker(Generic[Item, Result]):
    """One process, the parent's end of its pipe, and the items it is busy with."""

    def __init__(self, work: Callable[[Item], Result], chunk: Sequence[Item]) -> None:
        self.pipe, theirs = _context.Pipe()
        ends = (theirs, self.pipe)
        self._process: BaseProcess = _context.Process(target=_serve, args=(work, *ends), daemon=True)
        self._process.start()
        theirs.close()  # so that its death is the end of the pipe
        self.give(chunk)

    def give(self, chunk: Sequence[Item]) -> None:
        self.chunk = chunk
        try:
            self.pipe.send(chunk)
        except OSError:
            return  # it died between two chunks: `answer` will say so

    def answer(self) -> list[Result] | None:
        """The results for the chunk, or None if the process died over it."""
        try:
            results: list[Result] | WorkFailed = self.pipe.recv()
        except (EOFError, OSError):
            return None
        if isinstance(results, WorkFailed):
            raise results
        return results

    def stop(self) -> int | None:
        """End the process and return how it ended.

        It is told to: closing our end is not enough, since workers forked later hold a copy of it.
        """
        with contextlib.suppress(OSError):  # it is dead already
            self.pipe.send(None)
        self.pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _serve(work: Callable[[Item], Result], pipe: Connection, parents_end: Connection) -> None:
    """A worker's life: until told to end, take a chunk and answer it."""
    parents_end.close()  # so that the parent's death is the end of the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.disable()  # syntax trees are large and hold no cycles: collecting them costs a quarter of the time
    bytearray(16 << 20)  # having freed this, glibc no longer returns every parser's memory to the system
    with contextlib.suppress(EOFError):  # the parent was killed
        while chunk := pipe.recv():
            try:
                pipe.send([work(item) for item in chunk])
            except Exception:
                pipe.send(WorkFailed(traceback.format_exc()))
