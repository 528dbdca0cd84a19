"""KV page reservations: reserve, then commit or abort."""
import itertools


class PageLedger:
    def __init__(self, pages):
        self.free = pages
        self.committed = {}
        self._open = {}
        self._ids = itertools.count(1)

    def reserve(self, pages):
        if pages > self.free:
            return None
        self.free -= pages
        rid = next(self._ids)
        self._open[rid] = pages
        return rid

    def commit(self, rid, seq):
        self.committed[seq] = self.committed.get(seq, 0) + self._open.pop(rid)

    def abort(self, rid):
        self.free += self._open.pop(rid)

    def drop(self, seq):
        self.free += self.committed.pop(seq, 0)


class Admission:
    def __init__(self, ledger: PageLedger, backend):
        self.ledger = ledger
        self.backend = backend

    def admit(self, seq, pages):
        rid = self.ledger.reserve(pages)  # clean: committed or aborted
        if rid is None:
            return False
        if not self.backend.prepare(seq):
            self.ledger.abort(rid)
            return False
        self.ledger.commit(rid, seq)
        return True

    def extend(self, seq, pages):
        rid = self.ledger.reserve(pages)  # leak: a finished sequence returns with the reservation open
        if rid is None:
            return False
        if self.backend.finished(seq):
            return False
        self.ledger.commit(rid, seq)
        return True

    def migrate(self, seq, pages, peer):
        rid = self.ledger.reserve(pages)  # leak: the peer's refusal only logs
        if rid is None:
            return
        if peer.accept(seq):
            self.ledger.commit(rid, seq)
        else:
            self.backend.log("peer refused", seq)

    def fits(self, pages):
        rid = self.ledger.reserve(pages)  # clean: aborted at once
        if rid is None:
            return False
        self.ledger.abort(rid)
        return True
