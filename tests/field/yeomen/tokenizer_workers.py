"""Pool of tokenizer processes behind an HTTP server.

Batches go to an idle worker, the answer arrives at a callback on the pump thread.
"""
import multiprocessing as mp
import queue
import threading
import time
from typing import Callable, Dict, List, Optional


class Overloaded(Exception): ...
class WorkerDied(Exception): ...


class TokWorker:
    def __init__(self, idx: int, model_path: str):
        self.idx = idx
        self.conn, self._child = mp.Pipe()  # clean: both ends are closed in stop()
        self.proc = mp.Process(target=_child_main, args=(self._child, model_path), daemon=True)
        self.jobs = 0

    def start(self):
        self.proc.start()
        return self

    def ask(self, op: str, data):
        try:
            self.conn.send((op, data))
            self.jobs += 1
            ok, reply = self.conn.recv()
        except (BrokenPipeError, EOFError) as exc:
            raise WorkerDied(f"worker {self.idx}") from exc
        if not ok:
            raise ValueError(reply)
        return reply

    def stop(self) -> None:
        self.conn.close()
        self._child.close()
        self.proc.terminate()


def _child_main(conn, model_path):
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(model_path)
    while True:
        op, data = conn.recv()
        try:
            if op == "encode":
                conn.send((True, [e.ids for e in tok.encode_batch(data)]))
            else:
                conn.send((True, tok.decode(data)))
        except ValueError as exc:
            conn.send((False, str(exc)))


class TokenizerPool:
    def __init__(self, model_path: str, n: int = 4):
        self.model_path = model_path
        self.idle: "queue.LifoQueue[TokWorker]" = queue.LifoQueue()
        self.size = n
        self._serial = n
        self.closed = False
        for i in range(n):
            self.idle.put(TokWorker(i, model_path).start())  # clean: near miss, the queue owns it, close() stops those in it and checkin() the late ones

    def checkout(self, timeout: float = 2.0) -> TokWorker:
        try:
            return self.idle.get(timeout=timeout)  # clean: goes to the caller
        except queue.Empty:
            raise Overloaded("all tokenizers busy") from None

    def checkin(self, worker: TokWorker) -> None:
        if self.closed:
            worker.stop()
        else:
            self.idle.put(worker)

    def replace(self, worker: TokWorker) -> None:
        worker.stop()
        self._serial += 1
        fresh = TokWorker(self._serial, self.model_path).start()  # clean: checked in below
        self.checkin(fresh)

    def close(self, grace: float = 10.0) -> None:
        self.closed = True
        for _ in range(self.size):
            try:
                worker = self.checkout(grace)  # clean: stopped for good
            except Overloaded:
                return
            worker.stop()


class CharBudget:
    def __init__(self, chars: int):
        self._left = chars
        self._cond = threading.Condition()

    def reserve(self, n: int, wait: float = 0.0) -> Optional["Reservation"]:
        with self._cond:
            if not self._cond.wait_for(lambda: self._left >= n, timeout=wait):
                return None
            self._left -= n
            return Reservation(self, n)  # clean: goes to the caller

    def _give_back(self, n: int) -> None:
        with self._cond:
            self._left += n
            self._cond.notify_all()


class Reservation:
    def __init__(self, budget: CharBudget, n: int):
        self._budget = budget
        self.n = n

    def cancel(self) -> None:
        n, self.n = self.n, 0
        if n:
            self._budget._give_back(n)


class EncodeJob:
    def __init__(self, texts: List[str], reservation: Reservation, callback: Callable):
        self.texts = texts
        self.reservation = reservation
        self.callback = callback

    def resolve(self, ids) -> None:
        self.reservation.cancel()
        self.callback(ids, None)

    def reject(self, exc: Exception) -> None:
        self.callback(None, exc)


class Frontend:
    def __init__(self, pool: TokenizerPool, budget: CharBudget, backlog: int = 256):
        self.pool = pool
        self.budget = budget
        self.jobs: "queue.Queue[Optional[EncodeJob]]" = queue.Queue(backlog)
        self.streams: Dict[str, TokWorker] = {}
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def submit(self, texts: List[str], callback: Callable) -> None:
        chars = sum(map(len, texts))
        hold = self.budget.reserve(chars, wait=0.5)  # leak: reject() calls back without a cancel, and a full backlog raises Overloaded past it
        if hold is None:
            raise Overloaded("character budget")
        job = EncodeJob(texts, hold, callback)
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            raise Overloaded("backlog") from None

    def _pump(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            try:
                worker = self.pool.checkout(timeout=5.0)  # leak: bad input, a ValueError of ask(), is reported and the worker is not checked in
                ids = worker.ask("encode", job.texts)
                self.pool.checkin(worker)
                job.resolve(ids)
            except Overloaded as exc:
                job.reject(exc)
            except ValueError as exc:
                job.reject(exc)
            except WorkerDied as exc:
                self.pool.replace(worker)
                job.reject(exc)

    def encode_now(self, text: str) -> List[int]:
        hold = self.budget.reserve(len(text), wait=1.0)  # clean: near miss, cancelled in the finally that also covers a missing worker
        if hold is None:
            raise Overloaded("character budget")
        try:
            worker = self.pool.checkout()  # clean: replaced or checked in
            try:
                ids = worker.ask("encode", [text])[0]
            except WorkerDied:
                self.pool.replace(worker)
                raise
            except ValueError:
                self.pool.checkin(worker)
                raise
            self.pool.checkin(worker)
            return ids
        finally:
            hold.cancel()

    def open_stream(self, rid: str) -> None:
        if rid in self.streams:
            return
        self.streams[rid] = self.pool.checkout(timeout=0.1)  # leak: a stream that is aborted is deleted from the table with its worker

    def push(self, rid: str, ids: List[int]) -> str:
        worker = self.streams[rid]
        try:
            return worker.ask("decode", ids)
        except WorkerDied:
            self.pool.replace(self.streams.pop(rid))
            raise

    def finish_stream(self, rid: str, aborted: bool = False) -> None:
        if aborted:
            del self.streams[rid]
            return
        self.pool.checkin(self.streams.pop(rid))

    def self_check(self) -> List[int]:
        held: List[TokWorker] = []
        try:
            for _ in range(self.pool.size):
                held.append(self.pool.checkout(0.05))  # clean: near miss, whatever could be had is checked in
        except Overloaded:
            pass
        try:
            answers = {w.idx: w.ask("encode", ["abc"]) for w in held}
        finally:
            for w in held:
                self.pool.checkin(w)
        return [i for i, a in answers.items() if a != answers[held[0].idx]]

    def recycle(self, max_jobs: int) -> int:
        changed = 0
        for _ in range(self.pool.size):
            try:
                worker = self.pool.checkout(0.0)  # leak: a worker with few jobs takes the continue and is not checked in
            except Overloaded:
                break
            if worker.jobs < max_jobs:
                continue
            self.pool.replace(worker)
            changed += 1
        return changed

    def benchmark(self, text: str, rounds: int) -> float:
        worker = self.pool.checkout()  # leak: the RuntimeError for an answer that varies goes past the checkin
        first = worker.ask("encode", [text])
        began = time.perf_counter()
        for _ in range(rounds):
            if worker.ask("encode", [text]) != first:
                raise RuntimeError("not deterministic")
        self.pool.checkin(worker)
        return rounds / (time.perf_counter() - began)

    def close(self) -> None:
        self.jobs.put(None)
        self._thread.join()
        for rid in list(self.streams):
            self.finish_stream(rid)
        self.pool.close()
