# take: P.rent()
# give: P.vacate(X)
# gets: value
# type: LogprobScratch
import threading

import numpy as np


class LogprobScratch:
    """Process-wide [vocab] float32 rows for logprob post-processing. Never instantiate twice."""

    VOCAB = 32000
    CAP = 16
    _rows = []
    _on_loan = 0
    _cv = threading.Condition()

    @classmethod
    def configure(cls, vocab):
        with cls._cv:
            cls.VOCAB = vocab
            cls._rows.clear()

    @classmethod
    def rent(cls):
        with cls._cv:
            while cls._on_loan >= cls.CAP:
                cls._cv.wait()
            row = cls._rows.pop() if cls._rows else np.empty(cls.VOCAB, dtype=np.float32)
            cls._on_loan += 1
            return row

    @classmethod
    def vacate(cls, row):
        with cls._cv:
            if row.size == cls.VOCAB:
                cls._rows.append(row)
            cls._on_loan -= 1
            cls._cv.notify()
