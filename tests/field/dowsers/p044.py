"""Seats of a fixed decode batch, as a list of dataclass records."""
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Seat:
    index: int
    request: Optional[str] = None
    generated: list = field(default_factory=list)


class DecodeBatch:
    def __init__(self, width):
        self.seats = [Seat(i) for i in range(width)]

    def seat(self, request):
        for s in self.seats:
            if s.request is None:
                s.request = request
                return s
        return None

    def vacate(self, s):
        s.request = None
        s.generated.clear()


class BatchDriver:
    def __init__(self, batch: DecodeBatch, model):
        self.batch = batch
        self.model = model
        self.by_request = {}

    def join(self, request, prompt):
        s = self.batch.seat(request)  # leak: a prompt over the limit returns in the seat
        if s is None or len(prompt) > self.model.max_len:
            return False
        self.by_request[request] = s
        self.model.prefill(s.index, prompt)
        return True

    def leave(self, request):
        self.batch.vacate(self.by_request.pop(request))

    def rejoin(self, request, tokens):
        s = self.batch.seat(request)  # clean: kept in by_request, leave() vacates
        if s is not None:
            s.generated.extend(tokens)
            self.by_request[request] = s

    def logprobs(self, request, prompt):
        s = self.batch.seat(request)  # clean: vacated in finally
        if s is None:
            return None
        try:
            return self.model.logprobs(s.index, prompt)
        finally:
            self.batch.vacate(s)

    def fill(self, requests):
        joined = 0
        for r in requests:
            s = self.batch.seat(r)  # leak: only seats of valid prompts are stored
            if s is None:
                break
            if self.model.valid(r):
                self.by_request[r] = s
                joined += 1
        return joined
