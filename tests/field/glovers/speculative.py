"""Speculative decoding: draft model slots, draft trees and verification."""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol


class Model(Protocol):
    def step(self, cell: int, token: int) -> list[tuple[int, float]]: ...

    def verify(self, cells: list[int], tokens: list[int]) -> int: ...


class CellArena:
    """KV cells of the draft model, one for each speculated token."""

    def __init__(self, capacity: int):
        self._heap = list(range(capacity))
        self.capacity = capacity

    def grab(self) -> int:
        """Cell index or -1."""
        return heapq.heappop(self._heap) if self._heap else -1

    def drop(self, cell: int) -> None:
        heapq.heappush(self._heap, cell)

    def drop_all(self, cells: list[int]) -> None:
        for cell in cells:
            self.drop(cell)
        cells.clear()


@dataclass
class Node:
    token: int
    cell: int
    children: list["Node"] = field(default_factory=list)
    logprob: float = 0.0


@dataclass
class DraftState:
    request_id: int
    chain: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    root: Node | None = None
    bonus: int = -1


class Drafter:
    def __init__(self, model: Model, arena: CellArena, depth: int = 4):
        self.model = model
        self.arena = arena
        self.depth = depth
        self.states: dict[int, DraftState] = {}
        self.accepted = 0
        self.proposed = 0

    def open_state(self, request_id: int) -> DraftState:
        return self.states.setdefault(request_id, DraftState(request_id))

    # -- linear drafts --------------------------------------------------------
    def propose(self, state: DraftState, last: int) -> list[int]:
        token = last
        while len(state.chain) < self.depth:
            cell = self.arena.grab()  # clean: kept in state.chain, given back by accept or close_state
            if cell < 0:
                break
            state.chain.append(cell)
            token = self.model.step(cell, token)[0][0]
            state.tokens.append(token)
        self.proposed += len(state.tokens)
        return state.tokens

    def accept(self, state: DraftState) -> int:
        n = self.model.verify(state.chain, state.tokens)
        self.accepted += n
        self.arena.drop_all(state.chain)
        state.tokens.clear()
        return n

    def propose_confident(self, state: DraftState, last: int, floor: float) -> list[int]:
        token = last
        for _ in range(self.depth):
            cell = self.arena.grab()  # leak: break on a low score before the cell gets into the chain
            if cell < 0:
                break
            token, score = self.model.step(cell, token)[0]
            if score < floor:
                break
            state.chain.append(cell)
            state.tokens.append(token)
        return state.tokens

    def propose_confident_strict(self, state: DraftState, last: int, floor: float) -> list[int]:
        token = last
        for _ in range(self.depth):
            cell = self.arena.grab()  # clean: near miss, dropped before the break on a low score
            if cell < 0:
                break
            token, score = self.model.step(cell, token)[0]
            if score < floor:
                self.arena.drop(cell)
                break
            state.chain.append(cell)
            state.tokens.append(token)
        return state.tokens

    # -- trees ------------------------------------------------------------------
    def _node(self, token: int, logprob: float) -> Node | None:
        cell = self.arena.grab()  # clean: in the node that is returned
        if cell < 0:
            return None
        return Node(token, cell, logprob=logprob)

    def plant(self, state: DraftState, token: int) -> bool:
        if state.root is not None:
            return True
        state.root = self._node(token, 0.0)  # clean: near miss, freed by fell through close_state
        return state.root is not None

    def grow(self, node: Node, width: int) -> int:
        added = 0
        for token, logprob in self.model.step(node.cell, node.token)[:width]:
            child = self._node(token, logprob)  # clean: a child of the tree, fell walks down to it
            if child is None:
                return added
            node.children.append(child)
            added += 1
        return added

    def grow_pruned(self, node: Node, width: int) -> None:
        best: Node | None = None
        for token, logprob in self.model.step(node.cell, node.token)[:width]:
            child = self._node(token, logprob)  # leak: the losers of the comparison are dropped with their cells
            if child is None:
                break
            if best is None or child.logprob > best.logprob:
                best = child
        if best is not None:
            node.children.append(best)

    def fell(self, node: Node) -> None:
        stack = [node]
        while stack:
            top = stack.pop()
            stack.extend(top.children)
            top.children.clear()
            self.arena.drop(top.cell)

    def trim(self, node: Node, keep: int) -> None:
        """Keep the most probable children."""
        node.children.sort(key=lambda c: -c.logprob)
        for child in node.children[keep:]:
            self.fell(child)
        del node.children[keep:]

    # -- bonus token ------------------------------------------------------------
    def take_bonus(self, state: DraftState) -> bool:
        if state.bonus >= 0:
            return True
        state.bonus = self.arena.grab()  # leak: close_state does not look at bonus and nothing else drops it
        return state.bonus >= 0

    def use_bonus(self, state: DraftState, token: int) -> int | None:
        if not self.take_bonus(state):
            return None
        return self.model.step(state.bonus, token)[0][0]

    def close_state(self, request_id: int) -> None:
        state = self.states.pop(request_id, None)
        if state is None:
            return
        self.arena.drop_all(state.chain)
        if state.root is not None:
            self.fell(state.root)
            state.root = None


def beam(model: Model, arena: CellArena, start: int, width: int, steps: int) -> list[int]:
    """Beam search over the draft model that returns the tokens of the best beam."""
    first = arena.grab()  # clean: in beams, each cell in beams is dropped at the end of its step
    if first < 0:
        return []
    beams = [(0.0, [start], first)]
    for _ in range(steps):
        grown = []
        for score, tokens, cell in beams:
            for token, logprob in model.step(cell, tokens[-1])[:width]:
                grown.append((score + logprob, tokens + [token]))
        for _, _, cell in beams:
            arena.drop(cell)
        beams = []
        for score, tokens in heapq.nlargest(width, grown):
            cell = arena.grab()  # clean: near miss, dropped at the end of the next step or after the loop
            if cell < 0:
                break
            beams.append((score, tokens, cell))
        if not beams:
            return []
    best = max(beams)[1]
    for _, _, cell in beams:
        arena.drop(cell)
    return best


def rollouts(model: Model, arena: CellArena, start: int):
    """Endless stream of (cell, token); whoever iterates drops the cell."""
    token = start
    while True:
        cell = arena.grab()  # clean: yielded to the caller
        if cell < 0:
            return
        token = model.step(cell, token)[0][0]
        yield cell, token


def rollout_until(model: Model, arena: CellArena, start: int, stop: int) -> int:
    length = 0
    for cell, token in rollouts(model, arena, start):  # leak: the cell of the stop token is not dropped on break
        if token == stop:
            break
        length += 1
        arena.drop(cell)
    return length
