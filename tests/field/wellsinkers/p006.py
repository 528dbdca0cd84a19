"""Cache pages on the device, one flag a page."""
import torch


class PageFlags:
    def __init__(self, pages, device="cpu"):
        self.taken = torch.zeros(pages, dtype=torch.bool, device=device)

    def available(self):
        return int((~self.taken).sum())

    def grant(self, n):
        free = torch.nonzero(~self.taken).flatten()
        if free.numel() < n:
            return None
        pages = free[:n]
        self.taken[pages] = True
        return pages

    def reclaim(self, pages):
        self.taken[pages] = False


class DecodeSession:
    def __init__(self, flags, model):
        self.flags = flags
        self.model = model
        self.pages = None

    def begin(self, prompt_len):
        self.pages = self.flags.grant((prompt_len + 15) // 16)  # clean: stored, reclaimed by end
        return self.pages is not None

    def end(self):
        if self.pages is not None:
            self.flags.reclaim(self.pages)
            self.pages = None


def score_prompt(flags, model, tokens):
    pages = flags.grant(len(tokens) // 16 + 1)  # clean: reclaimed in finally
    if pages is None:
        return None
    try:
        return model.forward(tokens, pages).mean()
    finally:
        flags.reclaim(pages)


def score_many(flags, model, prompts):
    scores = []
    for tokens in prompts:
        pages = flags.grant(len(tokens) // 16 + 1)  # leak: pages kept for an infinite loss
        if pages is None:
            break
        loss = model.forward(tokens, pages).mean()
        if torch.isinf(loss):
            continue
        scores.append(float(loss))
        flags.reclaim(pages)
    return scores


def extend(flags, model, tokens):
    pages = flags.grant(1)  # leak: overwritten by the second grant
    pages = flags.grant(len(tokens) // 16 + 1)  # clean: reclaimed below
    if pages is not None:
        model.forward(tokens, pages)
        flags.reclaim(pages)
