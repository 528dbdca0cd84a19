"""Draft token trees. Nodes are numbers out of a NodePool, the tree keeps who has which children."""
from __future__ import annotations

from .pools import NodePool


class TokenTree:
    def __init__(self, nodes: NodePool, tok: int):
        self.nodes = nodes
        self.kids: dict[int, list[int]] = {}
        self.root = nodes.get(tok, -1)  # clean: near miss, -1 is no node, and free() walks from the root

    def __bool__(self):
        return self.root >= 0

    def expand(self, node: int, cands: list[int]) -> list[int]:
        new = []
        for tok in cands:
            i = self.nodes.get(tok, node)  # leak: a token that lookahead() has hung here before is skipped with its new node
            if i < 0:
                break
            if any(self.nodes.tok[k] == tok for k in self.kids.get(node, ())):
                continue
            self.kids.setdefault(node, []).append(i)
            new.append(i)
        return new

    def trim(self, node: int, keep: set[int]) -> None:
        rest = []
        for k in self.kids.get(node, ()):
            if k in keep:
                rest.append(k)
            else:
                self._drop(k)
        self.kids[node] = rest

    def _drop(self, node: int) -> None:
        for k in self.kids.pop(node, ()):
            self._drop(k)
        self.nodes.put(node)

    def lookahead(self, node: int, ngrams: dict) -> int:
        chain, at = [], node
        for tok in ngrams.get(self.nodes.tok[node], ()):
            i = self.nodes.get(tok, at)  # clean: near miss, a chain cut short is put back, a whole one is hung below node
            if i < 0:
                for j in chain:
                    self.nodes.put(j)
                return 0
            chain.append(i)
            at = i
        for i in chain:
            self.kids.setdefault(self.nodes.parent[i], []).append(i)
        return len(chain)

    def order(self) -> list[int]:
        out, todo = [], [self.root]
        while todo:
            n = todo.pop(0)
            out.append(n)
            todo += self.kids.get(n, ())
        return out

    def free(self) -> None:
        if self.root < 0:
            return
        for n in self.order():
            self.nodes.put(n)
        self.kids.clear()
        self.root = -1
