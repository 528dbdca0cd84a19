"""The service object: readers, writers and open transactions by client."""
from __future__ import annotations

from .pool import TablePool
from .reader import Reader
from .writer import Transaction, Writer


class FeatureService:
    def __init__(self, path: str) -> None:
        self._pool = TablePool(path, 4)
        self.reader = Reader(self._pool)
        self.writer = Writer(self._pool)
        self._transactions: dict[str, Transaction] = {}

    def open_for(self, client: str) -> bool:
        txn = self.writer.begin()  # clean: near miss, a client's earlier transaction is aborted before it is replaced
        if txn is None:
            return False
        earlier = self._transactions.pop(client, None)
        if earlier is not None:
            earlier.abort()
        self._transactions[client] = txn
        return True

    def put(self, client: str, entity: str, value: float) -> bool:
        txn = self._transactions.get(client)
        if txn is None:
            return False
        txn.write(entity, value)
        return True

    def close_for(self, client: str, keep: bool) -> int:
        txn = self._transactions.pop(client, None)
        if txn is None:
            return 0
        if keep:
            return txn.commit()
        txn.abort()
        return 0

    def copy(self, source: str, target: str) -> bool:
        txn = self.writer.begin()  # leak: no row at the source returns with the transaction open
        if txn is None:
            return False
        found = self.reader.row(source)
        if found is None:
            return False
        txn.write(target, found[1])
        txn.commit()
        return True
