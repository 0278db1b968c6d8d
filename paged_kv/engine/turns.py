"""Whose turn it is: one thread steps an engine at a time, first come, first served.

Owns: the line of threads, holding an interrupt back until a turn ends.
Does not know: what is done in a turn.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """A lock that is fair: `with turns:` waits behind everybody who came before.

    A thread that gives its turn up and asks again at once goes to the end of the line, so that of two threads that both
    want many turns each gets every second one.
    """

    def __init__(self) -> None:
        self._line: deque[int] = deque()
        self._changed = threading.Condition()

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        with self._changed:
            return bool(self._line) and self._line[0] == threading.get_ident()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if me in self._line:
                raise RuntimeError("called from within a step of the same engine, such as by a logits processor")
            self._line.append(me)
            try:
                while self._line[0] != me:
                    self._changed.wait()
            except BaseException:
                self._line.remove(me)
                self._changed.notify_all()
                raise

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends, so that it never cuts one in half; a second one is not held back.

    Only where Ctrl-C raises `KeyboardInterrupt` as usual: in the main thread, without a handler of the caller's own.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def note(signum: int, frame: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt
