# take: P.try_earmark(key, n)
# give: P.clear_earmark(key)
# gets: answer
# type: EncoderCacheBudget
from typing import Dict


class EncoderCacheBudget:
    """Space for vision/audio encoder outputs, counted in embedding tokens per request."""

    def __init__(self, cache_size: int):
        self.cache_size = cache_size
        self.num_free = cache_size
        self._by_request: Dict[str, int] = {}

    def holds(self, request_id: str) -> bool:
        return request_id in self._by_request

    def try_earmark(self, request_id: str, num_tokens: int) -> bool:
        if num_tokens > self.num_free:
            return False
        self._by_request[request_id] = self._by_request.get(request_id, 0) + num_tokens
        self.num_free -= num_tokens
        return True

    def clear_earmark(self, request_id: str) -> None:
        self.num_free += self._by_request.pop(request_id, 0)
