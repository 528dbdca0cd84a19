"""Leases of tokenizer worker processes, through three layers of helpers."""
import contextlib
import logging
import threading
import typing as t

logger = logging.getLogger(__name__)


class Worker:
    def __init__(self, wid: int) -> None:
        self.wid = wid
        self.warm = False

    def encode(self, text: str) -> t.List[int]:
        self.warm = True
        return [ord(c) for c in text]


class WorkerPool:
    def __init__(self, size: int) -> None:
        self._cond = threading.Condition()
        self._idle: t.List[Worker] = [Worker(i) for i in range(size)]

    def checkout_worker(self, timeout: t.Optional[float] = None) -> Worker:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._idle), timeout):
                raise TimeoutError("no tokenizer worker")
            return self._idle.pop()

    def checkin_worker(self, w: Worker) -> None:
        with self._cond:
            self._idle.append(w)
            self._cond.notify()


class Client:
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def lend(self) -> Worker:
        w = self._pool.checkout_worker(timeout=5.0)  # clean: lent to the caller
        if not w.warm:
            w.encode("warm up")
        return w

    def settle(self, w: Worker) -> None:
        self._pool.checkin_worker(w)

    @contextlib.contextmanager
    def worker(self) -> t.Iterator[Worker]:
        w = self.lend()  # clean: settled in the finally
        try:
            yield w
        finally:
            self.settle(w)

    @contextlib.contextmanager
    def worker_quick(self) -> t.Iterator[Worker]:
        w = self.lend()  # leak: after a ValueError in the body the handler swallows and nothing is settled
        try:
            yield w
            self.settle(w)
        except ValueError as exc:
            logger.warning("encode failed: %s", exc)


class Corpus:
    def __init__(self, client: Client) -> None:
        self.client = client

    def encode(self, docs: t.Iterable[str]) -> t.List[t.List[int]]:
        with self.client.worker() as w:  # clean: context manager
            return [w.encode(d) for d in docs]

    def encode_until(self, docs: t.Iterable[str], limit: int) -> t.List[int]:
        out: t.List[int] = []
        w = self.client.lend()  # clean: near miss, both the break and the end come to the settle
        for d in docs:
            out.extend(w.encode(d))
            if len(out) >= limit:
                break
        self.client.settle(w)
        return out[:limit]

    def encode_some(self, docs: t.Sequence[str]) -> t.List[int]:
        out: t.List[int] = []
        for d in docs:
            w = self.client.lend()  # leak: an empty document skips the settle
            ids = w.encode(d)
            if not ids:
                continue
            out.extend(ids)
            self.client.settle(w)
        return out

    def encode_pair(self, a: str, b: str) -> t.Optional[t.Tuple[t.List[int], t.List[int]]]:
        first = self.client.lend()  # leak: the handler of the second lend does not settle the first
        try:
            second = self.client.lend()  # clean: settled with the first
        except TimeoutError:
            logger.error("only one worker")
            return None
        res = first.encode(a), second.encode(b)
        self.client.settle(first)
        self.client.settle(second)
        return res

    def encode_pair_stacked(self, a: str, b: str) -> t.Tuple[t.List[int], t.List[int]]:
        with contextlib.ExitStack() as es:
            first = es.enter_context(self.client.worker())  # clean: the exit stack settles it
            second = es.enter_context(self.client.worker())  # clean: the exit stack settles it
            return first.encode(a), second.encode(b)

    def vocab_size(self) -> int:
        return max(self.client.lend().encode("\u00ff~"))  # leak: the worker is a temporary, nothing settles it

    def length(self, doc: str) -> int:
        es = contextlib.ExitStack()
        w = es.enter_context(self.client.worker())  # leak: the stack is closed only for a non-empty document
        n = len(w.encode(doc))
        if n:
            es.close()
        return n


class PinnedCorpus(Corpus):
    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._own: t.Optional[Worker] = None

    def open(self) -> "PinnedCorpus":
        if self._own is None:
            self._own = self.client.lend()  # clean: near miss, close() settles it and open() lends only once
        return self

    def encode(self, docs: t.Iterable[str]) -> t.List[t.List[int]]:
        if self._own is None:
            return super().encode(docs)
        return [self._own.encode(d) for d in docs]

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self.client.settle(own)


def encode_pinned(client: Client, docs: t.List[str]) -> t.List[t.List[int]]:
    corpus = PinnedCorpus(client).open()  # clean: closed after encoding
    out = corpus.encode(docs)
    corpus.close()
    return out


def encode_pinned_short(client: Client, docs: t.List[str]) -> t.List[t.List[int]]:
    corpus = PinnedCorpus(client).open()  # leak: no documents means a return before the close
    if not docs:
        return []
    out = corpus.encode(docs)
    corpus.close()
    return out
