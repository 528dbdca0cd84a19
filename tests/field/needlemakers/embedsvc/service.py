import logging

import torch

from .conns import Rented, StoreBusy

log = logging.getLogger(__name__)


class EmbedService:
    def __init__(self, model, tensors, conns, dim):
        self.model = model
        self.tensors = tensors       # PaddedPool
        self.conns = conns
        self.dim = dim
        self.pending = {}

    def _encode(self, ids):
        out = self.tensors.check_out(len(ids), self.dim)  # clean: returned to the caller
        self.model.encode(ids, out=out)
        return out

    def embed(self, ids):
        out = self._encode(ids)  # clean: checked in after the copy
        res = out[: len(ids)].cpu()
        self.tensors.check_in(out)
        return res

    def embed_normed(self, ids):
        out = self._encode(ids)  # leak: the name is rebound to the normalised copy, which is checked in instead
        out = torch.nn.functional.normalize(out, dim=-1)
        res = out[: len(ids)].cpu()
        self.tensors.check_in(out)
        return res

    def centroid(self, ids):
        return self._encode(ids)[: len(ids)].mean(0).cpu()  # leak: pooled output is averaged and dropped

    def similarity(self, query, table):
        q = self.tensors.filled(query)  # leak: a dimension mismatch returns None before check_in
        if table.shape[1] != q.shape[1]:
            log.error("dimension %d against %d", table.shape[1], q.shape[1])
            return None
        out = (q @ table.t())[: query.shape[0]]
        self.tensors.check_in(q)
        return out

    def store(self, key, ids):
        with Rented(self.conns) as conn:  # clean: with block
            conn.put(key, self.embed(ids).numpy().tobytes())

    def fetch_many(self, keys):
        found = {}
        conn = self.conns.rent()  # clean: given, or given as dead by the handler
        try:
            for key in keys:
                raw = conn.get(key)
                if raw is None:
                    continue
                found[key] = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        except ConnectionError:
            self.conns.give_dead(conn)
            raise
        self.conns.give(conn)
        return found

    def fetch_retry(self, key, tries=3):
        for _ in range(tries):
            try:
                conn = self.conns.rent()  # leak: a connection that breaks is abandoned before the next try
            except StoreBusy:
                continue
            try:
                raw = conn.get(key)
            except ConnectionError:
                log.info("retry of %s", key)
                continue
            self.conns.give(conn)
            return raw
        return None

    def begin(self, ticket, ids):
        if ticket in self.pending:
            raise KeyError(ticket)
        self.pending[ticket] = (self._encode(ids), len(ids))  # clean: near miss, kept in self.pending, collect checks it in

    def collect(self, ticket):
        out, n = self.pending.pop(ticket)
        try:
            return out[:n].cpu()
        finally:
            self.tensors.check_in(out)
