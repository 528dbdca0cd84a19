"""Client side: a bounded number of requests on the wire, with retries."""
from __future__ import annotations

import random
import time
from typing import Callable, List, Optional


class Overloaded(Exception):
    pass


class Credits:
    def __init__(self, n: int):
        self.n = n

    def spend(self) -> bool:
        if self.n == 0:
            return False
        self.n -= 1
        return True

    def refund(self) -> None:
        self.n += 1


class RewardClient:
    def __init__(self, post: Callable[[dict], Optional[dict]], credits: Credits):
        self.post = post
        self.credits = credits

    def score(self, prompt: str, answer: str, tries: int = 4) -> Optional[float]:
        if not self.credits.spend():  # clean: near miss, one credit for all tries, refunded in finally
            return None
        try:
            for i in range(tries):
                try:
                    reply = self.post({"p": prompt, "a": answer})
                except Overloaded:
                    time.sleep(random.random() * 2**i)
                    continue
                if reply is not None:
                    return float(reply["score"])
            return None
        finally:
            self.credits.refund()

    def score_batch(self, pairs: List[tuple]) -> List[Optional[float]]:
        scores: List[Optional[float]] = []
        for prompt, answer in pairs:
            if not self.credits.spend():  # leak: Overloaded appends None and goes on without a refund
                scores.append(None)
                continue
            try:
                reply = self.post({"p": prompt, "a": answer})
                scores.append(reply and float(reply["score"]))
            except Overloaded:
                scores.append(None)
                continue
            self.credits.refund()
        return scores
