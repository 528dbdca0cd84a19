# take: P.next_tokenizer()
# give: P.done_with(X)
# gets: value
# type: TokenizerBench
import copy
import queue


class TokenizerBench:
    """HF fast tokenizers aren't reentrant; keep N copies and block for one."""

    def __init__(self, tokenizer, n=4):
        self._q = queue.Queue(maxsize=n)
        for _ in range(n):
            self._q.put(copy.deepcopy(tokenizer))

    def next_tokenizer(self):
        return self._q.get()

    def done_with(self, tok):
        self._q.put_nowait(tok)
