"""Request facing side of the feature store."""
from __future__ import annotations

import logging
import time
from typing import Optional

from .conns import ShardConn, ShardConnPool
from .readers import TableReader, open_reader, scan

log = logging.getLogger("feature_store.service")


class FeatureService:
    def __init__(self, pool: ShardConnPool, retries: int = 3) -> None:
        self.pool = pool
        self.retries = retries
        self.readers: dict[str, TableReader] = {}
        self.default = [0.0, 0.0]

    def get_retrying(self, table: str, key: str) -> list[float]:
        for attempt in range(self.retries):
            conn = self.pool.borrow_for(key)  # leak: an attempt without an answer keeps its connection
            found = conn.query(table, [key])
            if not found:
                log.info("attempt %d found nothing for %s", attempt, key)
                time.sleep(0.01 * (attempt + 1))
                continue
            self.pool.give_back(conn)
            return found[key]
        return self.default

    def get_healthy(self, shard: int) -> Optional[ShardConn]:
        for _ in range(self.retries):
            conn = self.pool.borrow(shard)  # clean: near miss, a dead one is given back, a live one is returned
            if conn.ping():
                return conn
            self.pool.give_back(conn)
        return None

    def get_many(self, table: str, keys: list[str]) -> dict[str, list[float]]:
        by_shard: dict[int, list[str]] = {}
        for key in keys:
            by_shard.setdefault(self.pool.shard_of(key), []).append(key)
        merged: dict[str, list[float]] = {}
        for shard, part in by_shard.items():
            with self.pool.session(shard) as conn:  # clean: near miss, continue leaves the block as well
                if not conn.ping():
                    merged.update({key: self.default for key in part})
                    continue
                merged.update(conn.query(table, part))
        return merged

    def shard_load(self, shard: int) -> int:
        conn = self.get_healthy(shard)  # leak: the healthy connection is read and never given back
        if conn is None:
            return -1
        return conn.queries

    def subscribe(self, client: str, table: str, key: str) -> None:
        previous = self.readers.pop(client, None)
        if previous is not None:
            previous.close()
        self.readers[client] = open_reader(self.pool, table, key)  # clean: near miss, the old one was closed

    def unsubscribe(self, client: str) -> int:
        reader = self.readers.pop(client, None)
        if reader is None:
            return 0
        reader.close()
        return reader.rows

    def count_rows(self, table: str, keys: list[str]) -> int:
        if not keys:
            return 0
        reader = open_reader(self.pool, table, keys[0])  # leak: the reader is not closed
        reader.fetch(keys)
        return reader.rows

    def export(self, table: str, shard: int, keys: list[str]) -> list[list[float]]:
        return [row for _, row in scan(self.pool, table, shard, keys)]  # clean: run to its end

    def shutdown(self) -> None:
        while self.readers:
            client, reader = self.readers.popitem()
            log.info("closing the reader of %s", client)
            reader.close()
