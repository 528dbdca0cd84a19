# take: P.checkout(key)
# give: P.checkin(key)
# gets: value
# type: NamedWorkspaces
import torch


class _Ws:
    def __init__(self, tensor):
        self.tensor = tensor
        self.taken = False


class NamedWorkspaces:
    """attn / moe / sampler scratch: exactly one user each at any time."""

    def __init__(self, sizes):
        self._ws = {k: _Ws(torch.empty(v, dtype=torch.uint8)) for k, v in sizes.items()}

    def checkout(self, name):
        ws = self._ws[name]
        if ws.taken:
            raise RuntimeError(f"workspace '{name}' is already checked out")
        ws.taken = True
        return ws.tensor

    def checkin(self, name):
        ws = self._ws[name]
        if not ws.taken:
            raise RuntimeError(f"workspace '{name}' was not checked out")
        ws.taken = False
