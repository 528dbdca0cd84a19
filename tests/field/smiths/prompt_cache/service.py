from __future__ import annotations

import os
import tempfile
from typing import Callable, Dict, List, Optional, Sequence

from .persist import load_paths, longest, save_paths
from .radix import Node, PrefixTree
from .session import ChatSession, FewShotBank


class PromptTooLong(ValueError):
    pass


class PromptService:
    def __init__(self, tree: PrefixTree, max_tokens: int = 64) -> None:
        self.tree = tree
        self.max_tokens = max_tokens
        self.sessions: Dict[str, ChatSession] = {}
        self.rejected = 0

    def _prefill(self, node: Node, tokens: Sequence[int]) -> int:
        if len(tokens) > self.max_tokens:
            raise PromptTooLong(len(tokens))
        return len(tokens) - node.depth

    def complete(self, tokens: Sequence[int]) -> int:
        node = self.tree.match(tokens)  # leak: a full hit returns before the unlock
        if node.depth == len(tokens):
            return 0
        work = self._prefill(node, tokens)
        self.tree.unlock_path(node)
        return work

    def complete_many(self, prompts: List[Sequence[int]]) -> List[int]:
        out: List[int] = []
        for tokens in prompts:
            node = self.tree.match(tokens)  # leak: a prompt that is too long is counted and survived, its lock stays
            try:
                out.append(self._prefill(node, tokens))
            except PromptTooLong:
                self.rejected += 1
            else:
                self.tree.unlock_path(node)
        return out

    def score_many(self, prompts: List[Sequence[int]]) -> List[int]:
        out: List[int] = []
        for tokens in prompts:
            node = self.tree.match(tokens)  # clean: near miss, finally also covers the survived error
            try:
                out.append(self._prefill(node, tokens))
            except PromptTooLong:
                self.rejected += 1
            finally:
                self.tree.unlock_path(node)
        return out

    def cached_depth(self, tokens: Sequence[int]) -> int:
        return self.tree.match(tokens).depth  # leak: the locked node is dropped after reading its depth

    def open(self, sid: str, system: Sequence[int]) -> ChatSession:
        session = self.sessions.get(sid)
        if session is None:
            session = ChatSession(self.tree, system)  # clean: the table owns it, hangup closes it
            self.sessions[sid] = session
        return session

    def hangup(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is not None:
            session.close()

    def what_if(self, sid: str, extra: Sequence[int], judge: Callable[[int], bool]) -> bool:
        trial = self.sessions[sid].fork()  # leak: the judge's refusal returns before close
        if trial is None:
            return False
        depth = trial.extend(extra)
        if not judge(depth):
            return False
        trial.close()
        return True

    def branch(self, sid: str, new_sid: str) -> bool:
        if new_sid in self.sessions:
            return False
        child = self.sessions[sid].fork()  # clean: the table owns it
        if child is None:
            return False
        self.sessions[new_sid] = child
        return True


def main() -> None:
    tree = PrefixTree()
    svc = PromptService(tree)
    s = svc.open("a", [1, 2, 3, 4])  # clean: hangup below
    s.commit()
    s.extend([5, 6])
    s.commit()
    svc.branch("a", "b")
    print(svc.score_many([[1, 2, 9], [0] * 100]), svc.rejected)
    bank = FewShotBank(tree)
    print(bank.stage("t", [1, 2, 3, 4, 7]), bank.stage("t", [1, 2, 3, 4, 8]))
    with tempfile.TemporaryDirectory() as root:
        path = os.path.join(root, "paths")
        print(save_paths(tree, path), longest(tree, path), load_paths(PrefixTree(), path))
    bank.close()
    svc.hangup("a")
    svc.hangup("b")
    print("locks:", tree.total_locks, "evicted:", tree.evict(100))


if __name__ == "__main__":
    main()
