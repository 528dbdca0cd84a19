"""Embedding requests: they need a row and tokens for one forward only."""
from typing import List, Optional

import torch

from .kv_pool import ReqToTokenPool, TokenToKVPool
from .request import Request


class EmbeddingRunner:
    def __init__(self, model: torch.nn.Module, rows: ReqToTokenPool, tokens: TokenToKVPool):
        self.model = model
        self.rows = rows
        self.tokens = tokens

    def run(self, req: Request) -> Optional[torch.Tensor]:
        loc = self.tokens.alloc_tokens(len(req.prompt))  # clean: freed after the forward
        if loc is None:
            return None
        out = self.model(torch.tensor(req.prompt), loc)
        self.tokens.free_tokens(loc)
        return out

    def run_batch(self, reqs: List[Request]) -> List[torch.Tensor]:
        rows = self.rows.alloc(len(reqs))  # leak: only the first row is freed
        if rows is None:
            return []
        outs = []
        for r, req in zip(rows, reqs):
            self.rows.table[r, : len(req.prompt)] = torch.tensor(req.prompt, dtype=torch.int32)
            outs.append(self.model(torch.tensor(req.prompt), self.rows.table[r]))
        self.rows.free(rows[0])
        return outs

    def attach(self, req: Request) -> bool:
        loc = self.tokens.alloc_tokens(len(req.prompt))  # clean: detach frees all that the request holds
        if loc is None:
            return False
        req.locs.append(loc)
        return True

    def detach(self, req: Request) -> None:
        for loc in req.locs:
            self.tokens.free_tokens(loc)
        req.locs = []

    def reattach(self, req: Request) -> bool:
        loc = self.tokens.alloc_tokens(len(req.prompt))  # clean: near miss, the old locations are freed by detach first
        if loc is None:
            return False
        self.detach(req)
        req.locs = [loc]
        return True
