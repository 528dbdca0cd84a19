"""Line protocol: HELLO rate, then AUDIO blocks, then BYE."""
from __future__ import annotations

import itertools
import socket
import threading

import numpy as np

from .buffers import Starved
from .runner import Runner
from .session import UnsupportedRate


class Lobby:
    """Seats for connections. A seat is a number."""

    def __init__(self, seats: int) -> None:
        self._seats = list(range(seats))
        self._mutex = threading.Lock()

    def sit(self) -> int | None:
        with self._mutex:
            return self._seats.pop() if self._seats else None  # clean: handed to the caller

    def leave(self, seat: int) -> None:
        with self._mutex:
            self._seats.append(seat)


class Server:
    def __init__(self, runner: Runner, lobby: Lobby, port: int) -> None:
        self.runner, self.lobby = runner, lobby
        self.sock = socket.create_server(("", port))  # clean: closed in close()
        self.ids = itertools.count()

    def serve_forever(self) -> None:
        while not self.runner.halt.is_set():
            conn, _addr = self.sock.accept()  # leak: with a full lobby the client is told so and the connection is left open
            seat = self.lobby.sit()  # clean: the thread that talks to the client leaves in its finally
            if seat is None:
                conn.sendall(b"BUSY\n")
                continue
            threading.Thread(target=self._talk, args=(conn, seat), daemon=True).start()

    def _talk(self, conn: socket.socket, seat: int) -> None:
        sid = f"s{next(self.ids)}"
        try:
            with conn, conn.makefile("rb") as stream:  # clean: with statement
                word, rate = stream.readline().split()
                if word != b"HELLO":
                    return
                try:
                    session = self.runner.open_session(sid, int(rate))  # clean: near miss, the runner knows it by its id and the finally closes it there
                except UnsupportedRate:
                    conn.sendall(b"RATE\n")
                    return
                if session is None:
                    conn.sendall(b"FULL\n")
                    return
                while (head := stream.readline().split()) and head[0] == b"AUDIO":
                    try:
                        session.feed(np.frombuffer(stream.read(int(head[1])), np.int16))
                    except Starved:
                        conn.sendall(b"SLOW\n")
                session.flush()
        finally:
            self.runner.close_session(sid)
            self.lobby.leave(seat)

    def close(self) -> None:
        self.runner.halt.set()
        self.sock.close()
