from typing import NamedTuple, Optional


class Arena:
    def __init__(self, buffers, nbytes):
        self._spare = [bytearray(nbytes) for _ in range(buffers)]

    def rent(self) -> bytearray:
        return self._spare.pop() if self._spare else bytearray(0)

    def hand_in(self, buf: bytearray) -> None:
        self._spare.append(buf)


class Transfer(NamedTuple):
    peer: str
    send: bytearray
    recv: bytearray
    round: int


class RingReducer:
    """One transfer per peer, replaced as rounds advance."""

    def __init__(self, arena: Arena, rank: int):
        self.arena = arena
        self.rank = rank
        self.transfers: dict[str, Transfer] = {}
        self.bucket: Optional[bytearray] = None

    def connect(self, peer: str) -> bool:
        if peer in self.transfers:
            return False
        send = self.arena.rent()  # clean: kept over rounds, disconnect hands it in
        recv = self.arena.rent()  # leak: next_round replaces the field without handing it in
        self.transfers[peer] = Transfer(peer, send, recv, 0)
        return True

    def next_round(self, peer: str) -> int:
        old = self.transfers[peer]
        fresh = self.arena.rent()  # leak: the next round replaces this one too
        fresh[: len(old.send)] = old.send
        self.transfers[peer] = old._replace(recv=fresh, round=old.round + 1)
        return old.round + 1

    def fill_bucket(self, chunks: list[bytes]) -> int:
        if self.bucket is None:
            self.bucket = self.arena.rent()  # clean: flush and stop hand it in
        at = 0
        for chunk in chunks:
            self.bucket[at:at + len(chunk)] = chunk
            at += len(chunk)
        return at

    def flush(self) -> bytes:
        if self.bucket is None:
            return b""
        data = bytes(self.bucket)
        self.arena.hand_in(self.bucket)
        self.bucket = None
        return data

    def disconnect(self, peer: str) -> None:
        gone = self.transfers.pop(peer, None)
        if gone:
            self.arena.hand_in(gone.send)
            self.arena.hand_in(gone.recv)

    def stop(self) -> None:
        for peer in list(self.transfers):
            self.disconnect(peer)
        self.flush()
