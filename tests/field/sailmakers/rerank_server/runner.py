import logging
from typing import List

import torch

from .batcher import Job, MicroBatcher
from .pool import ScorePool

log = logging.getLogger(__name__)


class RerankRunner:
    def __init__(self, model, batcher: MicroBatcher, scores: ScorePool):
        self.model, self.batcher, self.scores = model, batcher, scores

    def _forward(self, job: Job) -> torch.Tensor:
        """One score per row, in a tensor of the score pool that the caller gives back."""
        out = self.scores.draw(len(job.rows))  # clean: returned to the caller
        for i, row in enumerate(job.rows):
            out[i] = self.model(row.t[None]).squeeze()
        return out

    def run_once(self) -> int:
        jobs = self.batcher.next_batch()
        for job in jobs:
            try:
                s = self._forward(job)  # clean: given back before the job's rows end
                job.scores = s.tolist()
                self.scores.back(s)
            finally:
                job.end()
        return len(jobs)

    def run_filtered(self, floor: float) -> List[Job]:
        good = []
        for job in self.batcher.next_batch():
            s = self._forward(job)  # leak: a job below the floor continues without back()
            job.end()
            if float(s.max()) < floor:
                job.error = "below floor"
                continue
            job.scores = s.tolist()
            self.scores.back(s)
            good.append(job)
        return good

    def stop(self) -> None:
        for job in self.batcher.next_batch():
            job.end()
