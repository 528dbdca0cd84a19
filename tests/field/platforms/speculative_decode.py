"""Speculative decoding: draft states are borrowed from a pool, scored and thrown back."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple


@dataclass(eq=False)
class DraftState:
    index: int
    tokens: List[int] = field(default_factory=list)
    logprob: float = 0.0

    def reset(self) -> None:
        self.tokens.clear()
        self.logprob = 0.0


class Draft(NamedTuple):
    state: DraftState
    score: float


class DraftStatePool:
    def __init__(self, capacity: int) -> None:
        self._spare: List[DraftState] = [DraftState(i) for i in range(capacity)]
        self.misses = 0

    def get(self) -> Optional[DraftState]:
        if not self._spare:
            self.misses += 1
            return None
        state = self._spare.pop()  # clean: near miss, reset and then returned
        state.reset()
        return state

    def get_batch(self, wanted: int) -> List[DraftState]:
        cut = max(0, len(self._spare) - wanted)
        taken = self._spare[cut:]  # clean: the slice is cut from the store and returned
        del self._spare[cut:]
        return taken

    def put(self, state: DraftState) -> None:
        self._spare.append(state)


class DraftModel:
    """Cheap proposal model; forks states while it proposes."""

    def __init__(self, pool: DraftStatePool, vocab: int) -> None:
        self.pool = pool
        self.vocab = vocab

    def propose(self, prefix: List[int], depth: int) -> Optional[DraftState]:
        state = self.pool.get()  # clean: returned to the caller
        if state is None:
            return None
        state.tokens.extend(prefix)
        for _ in range(depth):
            state.tokens.append((sum(state.tokens) * 31) % self.vocab)
            state.logprob += 0.2 - (state.tokens[-1] % 7) / 10
        return state

    def propose_scored(self, prefix: List[int], depth: int) -> Optional[Draft]:
        state = self.propose(prefix, depth)  # clean: travels to the caller inside the named tuple
        return None if state is None else Draft(state, state.logprob)

    def fork(self, state: DraftState) -> Optional[DraftState]:
        twin = self.pool.get()  # clean: returned to the caller
        if twin is not None:
            twin.tokens.extend(state.tokens)
            twin.logprob = state.logprob
        return twin

    def candidates(self, prefix: List[int], width: int) -> Iterator[DraftState]:
        """Yield proposals of growing depth; the consumer puts each one back."""
        for depth in range(1, width + 1):
            state = self.propose(prefix, depth)  # clean: near miss, the break has none and the rest are yielded to the consumer
            if state is None:
                break
            yield state


class Verifier:
    def __init__(self, model: DraftModel, pool: DraftStatePool, threshold: float) -> None:
        self.model = model
        self.pool = pool
        self.threshold = threshold
        self.history: Dict[int, DraftState] = {}

    def accept(self, prefix: List[int], depth: int) -> Tuple[List[int], bool]:
        draft = self.model.propose_scored(prefix, depth)  # leak: a rejected draft returns the prefix and drops its state
        if draft is None:
            return prefix, False
        if draft.score < self.threshold:
            return prefix, False
        tokens = list(draft.state.tokens)
        self.pool.put(draft.state)
        return tokens, True

    def accept_pair(self, prefix: List[int], depth: int) -> List[int]:
        draft = self.model.propose_scored(prefix, depth)  # clean: near miss, the state is unpacked and put back on both branches
        if draft is None:
            return prefix
        state, score = draft
        result = list(state.tokens) if score >= self.threshold else prefix
        self.pool.put(state)
        return result

    def best_of(self, prefix: List[int], width: int) -> List[int]:
        best: Optional[DraftState] = None
        for depth in range(1, width + 1):
            state = self.model.propose(prefix, depth)  # leak: a better proposal replaces the best so far, which is not put back
            if state is None:
                break
            if best is None or state.logprob > best.logprob:
                best = state
            else:
                self.pool.put(state)
        if best is None:
            return prefix
        tokens = list(best.tokens)
        self.pool.put(best)
        return tokens

    def longest(self, prefix: List[int], width: int) -> List[int]:
        kept: Optional[DraftState] = None
        for state in self.model.candidates(prefix, width):  # clean: near miss, each is either kept, displaced and put back, or put back
            if kept is None:
                kept = state
                continue
            loser = state if len(state.tokens) <= len(kept.tokens) else kept
            kept = kept if loser is state else state
            self.pool.put(loser)
        if kept is None:
            return prefix
        tokens = list(kept.tokens)
        self.pool.put(kept)
        return tokens

    def first_good(self, prefix: List[int], width: int) -> List[int]:
        for state in self.model.candidates(prefix, width):  # leak: the accepted state is read and the break leaves it out of the pool
            if state.logprob >= self.threshold:
                prefix = list(state.tokens)
                break
            self.pool.put(state)
        return prefix

    def remember(self, key: int, state: DraftState) -> bool:
        twin = self.model.fork(state)  # clean: near miss, an older twin under the key is put back first; forget returns it
        if twin is None:
            return False
        self.forget(key)
        self.history[key] = twin
        return True

    def forget(self, key: int) -> None:
        old = self.history.pop(key, None)
        if old is not None:
            self.pool.put(old)

    def branch(self, prefixes: List[List[int]]) -> int:
        states = self.pool.get_batch(len(prefixes))  # leak: a state paired with an empty prefix is skipped and not put back
        done = 0
        for state, prefix in zip(states, prefixes):
            if not prefix:
                continue
            state.reset()
            state.tokens.extend(prefix)
            done += len(state.tokens)
            self.pool.put(state)
        return done
