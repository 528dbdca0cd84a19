# take: P.moor(key)
# give: P.cast_off(key)
# gets: value
# type: MambaBerths
class NoBerth(RuntimeError):
    """raised when every SSM state row is taken"""


class MambaBerths:
    # request id -> row of the conv/ssm state caches
    def __init__(self, max_seqs: int) -> None:
        self.cache_indices: dict[str, int] = {}
        self.free_indices: list[int] = list(range(max_seqs))

    def moor(self, rid: str) -> int:
        if rid in self.cache_indices:
            raise KeyError(f"{rid} is moored already")
        if not self.free_indices:
            raise NoBerth(rid)
        row = self.free_indices.pop(0)
        self.cache_indices[rid] = row
        return row

    def cast_off(self, rid: str) -> None:
        if rid in self.cache_indices:
            self.free_indices.append(self.cache_indices.pop(rid))
