from typing import List, Optional

from .arena import NodeArena


class DraftTree:
    def __init__(self, arena: NodeArena):
        self.arena = arena
        self.levels: List[List[int]] = []

    def expand(self, tokens: List[int], parents: List[int]) -> bool:
        nodes = self.arena.new_nodes(len(tokens))  # clean: near miss, becomes a level, prune and dispose delete its nodes
        if nodes is None:
            return False
        for node, tok, par in zip(nodes, tokens, parents):
            self.arena.tokens[node] = tok
            self.arena.parents[node] = par
        self.levels.append(nodes)
        return True

    def prune(self, depth: int) -> None:
        while len(self.levels) > depth:
            self.arena.del_nodes(self.levels.pop())

    def dispose(self) -> None:
        self.prune(0)

    def replace_leafs(self, tokens: List[int]) -> bool:
        nodes = self.arena.new_nodes(len(tokens))  # leak: the nodes of the last level are overwritten, never deleted
        if nodes is None:
            return False
        for node, tok in zip(nodes, tokens):
            self.arena.tokens[node] = tok
        self.levels[-1] = nodes
        return True

    def swap_leafs(self, tokens: List[int]) -> bool:
        nodes = self.arena.new_nodes(len(tokens))  # clean: near miss, the old level is popped and deleted before
        if nodes is None:
            return False
        self.arena.del_nodes(self.levels.pop())
        for node, tok in zip(nodes, tokens):
            self.arena.tokens[node] = tok
        self.levels.append(nodes)
        return True

    def best_path(self, accepted: List[int]) -> Optional[List[int]]:
        scratch = self.arena.new_nodes(len(accepted))  # leak: a token missing from its level returns None with the scratch nodes taken
        if scratch is None:
            return None
        for node, tok, level in zip(scratch, accepted, self.levels):
            if all(int(self.arena.tokens[x]) != tok for x in level):
                return None
            self.arena.tokens[node] = tok
        path = self.arena.tokens[scratch].tolist()
        self.arena.del_nodes(scratch)
        return path
