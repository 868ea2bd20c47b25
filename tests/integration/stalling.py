"""A way to a listener on loopback that lets so many bytes through, and then no more."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

READ_BYTES = 1 << 14
LOOPBACK = "127.0.0.1"


class StallingWay:
    """Forwards connections to a port; what the listener says stops after `bytes_max` in all.

    The connections stay up: whoever waits for the rest sees a peer that is slow, not one that left.
    """

    def __init__(self, port: int, bytes_max: int) -> None:
        self.stalled = threading.Event()
        self._goes_on = threading.Event()
        self._lock = threading.Lock()
        self._left_bytes = bytes_max
        self._to = (LOOPBACK, port)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def let_all_through(self) -> None:
        self._goes_on.set()

    def close(self) -> None:
        self._goes_on.set()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self._sockets += [near, far]
                for source, sink, counted in ((near, far, False), (far, near, True)):
                    arguments = (source, sink, counted)
                    threading.Thread(target=self._copy, args=arguments, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with suppress(OSError):  # either end went
            while data := source.recv(READ_BYTES):
                if counted:
                    self._wait_for_leave(len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _wait_for_leave(self, size_bytes: int) -> None:
        with self._lock:
            self._left_bytes -= size_bytes
            if self._left_bytes >= 0:
                return
        self.stalled.set()
        self._goes_on.wait()


@contextmanager
def stalling_way(port: int, bytes_max: int) -> Iterator[StallingWay]:
    way = StallingWay(port, bytes_max)
    try:
        yield way
    finally:
        way.close()
