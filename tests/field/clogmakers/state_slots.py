"""Recurrent state slots of a hybrid (attention + SSM) serving engine."""
from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

CHECKPOINT_EVERY = 512


class OutOfSlots(Exception):
    pass


class SlotPool:
    def __init__(self, n: int, shape, dtype=torch.bfloat16, device="cuda"):
        self.state = torch.zeros((n, *shape), dtype=dtype, device=device)
        self.free_slots = torch.arange(n)
        self.valid = torch.zeros(n, dtype=torch.bool)

    def available(self) -> int:
        return self.free_slots.numel()

    def alloc(self, n: int = 1) -> Optional[torch.Tensor]:
        if n > self.free_slots.numel():
            return None
        select, self.free_slots = self.free_slots.split([n, self.free_slots.numel() - n])  # clean: handed to the caller
        self.valid[select] = False
        return select

    def free(self, idx: torch.Tensor) -> None:
        if idx.numel():
            self.free_slots = torch.cat([self.free_slots, idx.cpu()])

    def fork_from(self, src: torch.Tensor) -> Optional[torch.Tensor]:
        """Copies states to new slots."""
        dst = self.alloc(src.numel())  # leak: a source that is not valid yet is noticed only after the alloc
        if dst is None:
            return None
        if not bool(self.valid[src].all()):
            return None
        self.state[dst] = self.state[src]
        self.valid[dst] = True
        return dst


class HybridPool:
    """Convolution and SSM states, always allocated in step."""

    def __init__(self, n, conv_shape, ssm_shape):
        self.conv = SlotPool(n, conv_shape)
        self.ssm = SlotPool(n, ssm_shape, dtype=torch.float32)

    def alloc(self, n=1):
        conv = self.conv.alloc(n)  # clean: near miss, freed when there is no ssm slot, else part of the pair
        if conv is None:
            return None
        ssm = self.ssm.alloc(n)  # clean: part of the pair that is returned
        if ssm is None:
            self.conv.free(conv)
            return None
        return conv, ssm

    def fork(self, pair):
        conv = self.conv.fork_from(pair[0])  # leak: not freed when the ssm state cannot be forked
        ssm = self.ssm.fork_from(pair[1])  # leak: not freed when the conv state could not be forked
        if conv is None or ssm is None:
            return None
        return conv, ssm

    def free(self, pair):
        self.conv.free(pair[0])
        self.ssm.free(pair[1])


@dataclass
class Node:
    """A checkpoint in the prefix tree."""

    tokens: tuple
    state: Optional[tuple] = None
    hits: int = 0
    children: Dict[int, "Node"] = field(default_factory=dict)


@dataclass
class Req:
    rid: str
    tokens: List[int]
    computed: int = 0
    state: Optional[tuple] = None
    drafts: Optional[tuple] = None
    node: Optional[Node] = None
    done: bool = False


class CheckpointTree:
    def __init__(self, pool: HybridPool):
        self.pool = pool
        self.nodes: Dict[tuple, Node] = {}

    def lookup(self, tokens) -> Optional[Node]:
        for n in range(len(tokens) // CHECKPOINT_EVERY, 0, -1):
            node = self.nodes.get(tuple(tokens[: n * CHECKPOINT_EVERY]))
            if node is not None and node.state is not None:
                node.hits += 1
                return node
        return None

    def insert(self, req: Req) -> Optional[Node]:
        if req.computed % CHECKPOINT_EVERY:
            return None
        key = tuple(req.tokens[: req.computed])
        node = self.nodes.setdefault(key, Node(key))
        copy = self.pool.fork(req.state)  # leak: a node that two requests reach gets its state overwritten
        if copy is None:
            return None
        node.state = copy
        return node

    def insert_once(self, req: Req) -> bool:
        key = tuple(req.tokens[: req.computed])
        node = self.nodes.setdefault(key, Node(key))
        if node.state is not None:
            return False
        node.state = self.pool.fork(req.state)  # clean: near miss, only into a node without a state, evict() frees it
        return node.state is not None

    def evict(self, need: int) -> int:
        freed = 0
        for node in sorted(self.nodes.values(), key=lambda n: n.hits):
            if freed >= need:
                break
            if node.state is None:
                continue
            self.pool.free(node.state)
            node.state = None
            freed += 1
        return freed


class Engine:
    def __init__(self, model, pool: HybridPool, tree: CheckpointTree, num_drafts: int = 4):
        self.model = model
        self.pool = pool
        self.tree = tree
        self.num_drafts = num_drafts
        self.waiting: List[Req] = []
        self.running: List[Req] = []

    def start(self, req: Req) -> bool:
        """Gives the request its state, continued from a checkpoint where there is one."""
        if req.state is not None:
            return True
        node = self.tree.lookup(req.tokens)
        if node is not None:
            req.state = self.pool.fork(node.state)  # leak: retract() sets the state of the request to None
            if req.state is not None:
                req.node, req.computed = node, len(node.tokens)
                return True
        if not self.pool.conv.available():
            self.tree.evict(1)
        fresh = self.pool.alloc()  # leak: as above, a retracted request forgets it
        if fresh is None:
            return False
        for pool, idx in zip((self.pool.conv, self.pool.ssm), fresh):
            pool.state[idx] = 0
            pool.valid[idx] = True
        req.state = fresh
        return True

    def retract(self, req: Req) -> None:
        """Back to the queue, to be computed again from its prompt."""
        self.running.remove(req)
        self._free_drafts(req)
        req.state = None
        req.computed = 0
        self.waiting.insert(0, req)

    def finish(self, req: Req) -> None:
        req.done = True
        self.running.remove(req)
        self._free_drafts(req)
        if req.state is not None:
            self.pool.free(req.state)
            req.state = None

    def _free_drafts(self, req: Req) -> None:
        if req.drafts is not None:
            self.pool.free(req.drafts)
            req.drafts = None

    def draft(self, req: Req) -> List[int]:
        if req.drafts is None:
            req.drafts = self.pool.alloc(self.num_drafts)  # clean: near miss, only without drafts, verify, retract and finish free them
        if req.drafts is None:
            return []
        return self.model.draft(req.tokens, req.state, req.drafts)

    def verify(self, req: Req, proposed: List[int]) -> int:
        if not proposed:
            return 0
        accepted = self.model.verify(req.tokens, proposed, req.state, req.drafts)
        if accepted:
            conv, ssm = req.drafts
            at = accepted - 1
            for pool, dst, src in zip((self.pool.conv, self.pool.ssm), req.state, (conv, ssm)):
                pool.state[dst] = pool.state[src[at : at + 1]]
            req.tokens.extend(proposed[:accepted])
        self._free_drafts(req)
        return accepted

    def score(self, tokens: List[int]) -> torch.Tensor:
        pair = self.pool.alloc()  # clean: freed in finally, OutOfSlots is raised without one
        if pair is None:
            raise OutOfSlots("score")
        try:
            return self.model.logprobs(tokens, pair)
        finally:
            self.pool.free(pair)

    def best_of(self, req: Req, n: int) -> Optional[List[int]]:
        """n continuations from the same state, the best one is returned."""
        tried: List[tuple] = []
        best, best_score = None, float("-inf")
        for _ in range(n):
            pair = self.pool.fork(req.state)  # clean: all that were forked are in tried and freed below
            if pair is None:
                break
            tried.append(pair)
            out, score = self.model.sample(req.tokens, pair)
            if score > best_score:
                best, best_score = out, score
        while tried:
            self.pool.free(tried.pop())
        return best

    def adopt_best(self, req: Req, n: int) -> bool:
        """Like best_of, and the request goes on from the winner."""
        winner, top = None, float("-inf")
        for _ in range(n):
            pair = self.pool.fork(req.state)  # clean: near miss, the loser of every comparison is freed, the winner moves in
            if pair is None:
                break
            _, score = self.model.sample(req.tokens, pair)
            if score > top:
                if winner is not None:
                    self.pool.free(winner)
                winner, top = pair, score
            else:
                self.pool.free(pair)
        if winner is None:
            return False
        self.pool.free(req.state)
        req.state = winner
        return True

    def warmup(self, sizes) -> int:
        done = 0
        for n in sizes:
            pairs = self.pool.alloc(n)  # clean: freed at the end of the turn, None breaks before anything else
            if pairs is None:
                break
            self.model.warm(pairs)
            done += 1
            self.pool.free(pairs)
        return done
