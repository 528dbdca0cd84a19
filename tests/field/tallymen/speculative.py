"""Speculative decoding: draft slots, target slots and token-tree buffers."""

import heapq
import logging
from collections import defaultdict
from typing import Callable, Dict, List, Optional

logger = logging.getLogger(__name__)


class NoSlots(Exception):
    pass


class SlotPool:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._free: List[int] = list(range(size))
        self.owner: Dict[int, str] = {}

    def reserve(self, owner: str) -> int:
        if not self._free:
            raise NoSlots(self.name)
        idx = heapq.heappop(self._free)  # clean: handed to the caller
        self.owner[idx] = owner
        return idx

    def unreserve(self, idx: int) -> None:
        self.owner.pop(idx, None)
        heapq.heappush(self._free, idx)

    def compact(self, mover: Callable[[int, int], None]) -> Optional[tuple]:
        """Moves the highest slot that is in use into the lowest free one."""
        if not self._free or not self.owner:
            return None
        lo = heapq.heappop(self._free)  # leak: not pushed back when the pool is compact already
        hi = max(self.owner)
        if hi < lo:
            return None
        mover(hi, lo)
        self.owner[lo] = self.owner.pop(hi)
        heapq.heappush(self._free, hi)
        return hi, lo


class TokenTree:
    def __init__(self, width: int) -> None:
        self.width = width
        self.nodes: List[int] = []

    def fill(self, drafts: List[int]) -> None:
        self.nodes = list(drafts[: self.width])


class TreeArena:
    def __init__(self) -> None:
        self._spare: Dict[int, List[TokenTree]] = defaultdict(list)
        self.lent = 0

    def borrow(self, width: int) -> TokenTree:
        self.lent += 1
        if self._spare[width]:
            return self._spare[width].pop()  # clean: handed to the caller
        return TokenTree(width)

    def restore(self, tree: TokenTree) -> None:
        self.lent -= 1
        tree.nodes = []
        self._spare[tree.width].append(tree)


class SpecRequest:
    def __init__(self, request_id: str, prompt: List[int], group: str = "default") -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.group = group
        self.draft_slot: Optional[int] = None
        self.target_slot: Optional[int] = None
        self.accepted = 0
        self.proposed = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.proposed)


class Rollback:
    """Remembers the tokens before a risky step in a tree buffer."""

    def __init__(self, arena: TreeArena, tree: TokenTree, request: SpecRequest) -> None:
        self.arena = arena
        self.tree = tree
        self.request = request
        self.length = len(request.tokens)
        tree.fill(request.tokens[-tree.width:])

    def commit(self) -> None:
        self.request.accepted += len(self.request.tokens) - self.length
        self.tree = None

    def undo(self) -> None:
        del self.request.tokens[self.length:]
        self.arena.restore(self.tree)
        self.tree = None


class SpecScheduler:
    def __init__(self, draft_model, target_model, verifier, draft_slots=16, target_slots=16):
        self.draft_model = draft_model
        self.target_model = target_model
        self.verifier = verifier
        self.draft_pool = SlotPool("draft", draft_slots)
        self.target_pool = SlotPool("target", target_slots)
        self.arena = TreeArena()
        self.width = 8
        self.active: Dict[str, SpecRequest] = {}
        self.empty_drafts = 0

    # -- admission -----------------------------------------------------------

    def attach(self, request: SpecRequest) -> bool:
        """Gives the request a slot in both models; False when there is none."""
        try:
            draft = self.draft_pool.reserve(request.request_id)  # leak: NoSlots of the target pool is handled with the draft slot held
            target = self.target_pool.reserve(request.request_id)  # clean: the request's until detach()
        except NoSlots as exc:
            logger.debug("%s has to wait: %s", request.request_id, exc)
            return False
        request.draft_slot = draft
        request.target_slot = target
        self.active[request.request_id] = request
        return True

    def attach_plain(self, request: SpecRequest) -> None:
        request.target_slot = self.target_pool.reserve(request.request_id)  # clean: no draft slot here and detach() checks each for None
        self.active[request.request_id] = request

    def disable_draft(self, request: SpecRequest) -> None:
        if request.draft_slot is None:
            return
        logger.info("%s accepts %.2f, drafts off", request.request_id, request.acceptance)
        self.draft_pool.unreserve(request.draft_slot)
        request.draft_slot = None

    def enable_draft(self, request: SpecRequest) -> bool:
        if request.draft_slot is not None:
            return True
        try:
            request.draft_slot = self.draft_pool.reserve(request.request_id)  # clean: near miss, only when there was none; detach() or disable_draft() unreserve it
        except NoSlots:
            return False
        return True

    def detach(self, request: SpecRequest) -> None:
        self.active.pop(request.request_id, None)
        if request.draft_slot is not None:
            self.draft_pool.unreserve(request.draft_slot)
            request.draft_slot = None
        if request.target_slot is not None:
            self.target_pool.unreserve(request.target_slot)
            request.target_slot = None

    # -- rounds --------------------------------------------------------------

    def propose(self, request: SpecRequest) -> Optional[TokenTree]:
        tree = self.arena.borrow(self.width)  # leak: without drafts None is returned and the tree forgotten
        drafts = self.draft_model.expand(request.draft_slot, request.tokens, self.width)
        if not drafts:
            self.empty_drafts += 1
            return None
        tree.fill(drafts)
        request.proposed += len(tree.nodes)
        return tree

    def run_round(self) -> None:
        for request in list(self.active.values()):
            if request.draft_slot is None:
                self._plain_step(request)
                continue
            tree = self.propose(request)  # clean: near miss, None means nothing was handed out, else the finally restores
            if tree is None:
                self._plain_step(request)
                continue
            try:
                good = self.target_model.verify(request.target_slot, tree.nodes)
                request.tokens.extend(tree.nodes[:good])
                request.accepted += good
            finally:
                self.arena.restore(tree)
            if request.acceptance < 0.2:
                self.disable_draft(request)

    def _plain_step(self, request: SpecRequest) -> None:
        request.tokens.append(self.target_model.next(request.target_slot, request.tokens))

    def run_grouped(self, requests: List[SpecRequest]) -> Dict[str, int]:
        trees: Dict[str, TokenTree] = {}
        for request in requests:
            trees[request.group] = self.arena.borrow(self.width)  # leak: a second request of the same group overwrites the first one's tree
            trees[request.group].fill(request.tokens[-self.width:])
        try:
            return {g: self.target_model.verify(None, t.nodes) for g, t in trees.items()}
        finally:
            for tree in trees.values():
                self.arena.restore(tree)

    def verify_later(self, request: SpecRequest, drafts: List[int]) -> None:
        tree = self.arena.borrow(max(1, len(drafts)))  # leak: the verifier calls accepted() only when something was accepted
        tree.fill(drafts)

        def accepted(count: int) -> None:
            request.tokens.extend(tree.nodes[:count])
            request.accepted += count
            self.arena.restore(tree)

        self.verifier.submit(tree.nodes, accepted)

    def risky_step(self, request: SpecRequest) -> bool:
        guard = Rollback(self.arena, self.arena.borrow(self.width), request)  # leak: commit() drops the tree without restoring it
        self._plain_step(request)
        if self.target_model.confident(request.target_slot):
            guard.commit()
            return True
        guard.undo()
        return False

    def wider(self, tree: TokenTree, width: int) -> TokenTree:
        bigger = self.arena.borrow(width)  # clean: returned in place of the one restored here
        bigger.fill(tree.nodes)
        self.arena.restore(tree)
        return bigger

    def explore(self, request: SpecRequest, limit: int) -> int:
        best = 0
        tree = self.arena.borrow(self.width)  # clean: near miss, wider() restores the one that it replaces
        try:
            while tree.width < limit:
                tree.fill(self.draft_model.expand(request.draft_slot, request.tokens, tree.width))
                best = max(best, self.target_model.verify(request.target_slot, tree.nodes))
                tree = self.wider(tree, tree.width * 2)  # clean: restored in the finally or by the next wider()
        finally:
            self.arena.restore(tree)
        return best


class Verifier:
    def __init__(self, target_model) -> None:
        self.target_model = target_model
        self._queue: list = []

    def submit(self, nodes: List[int], accepted: Callable[[int], None]) -> None:
        self._queue.append((nodes, accepted))

    def flush(self) -> int:
        work, self._queue = self._queue, []
        for nodes, accepted in work:
            count = self.target_model.verify(None, nodes)
            if count > 0:
                accepted(count)
        return len(work)
