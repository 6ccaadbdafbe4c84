"""Stopping a run from outside: the first signal asks for the next step boundary, a second one ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_REQUEST_SECONDS = 0.5
_NOTICE = "stopping at the next step; press Ctrl-C again to end at once\n"
_SHOW_CURSOR = "\x1b[?25h"


class StopRequest:
    """Context manager; `.requested` becomes True with the first SIGINT or SIGTERM.

    A second signal restores the default action and raises it again, so the process ends without cleaning up; whatever
    it was writing is published by rename, so nothing half-written is taken for whole. Signals within half a second of
    the first count as the same request: `timeout` and some terminals deliver one to the process and to its group.
    Handlers are restored on exit. Raises RuntimeError outside the main thread, where Python cannot set handlers.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopRequest works only in the main thread: Python delivers signals there")
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def request(self) -> None:
        """Ask for the stop as a first signal does; one that follows within half a second is the same request."""
        self.requested, self._first_at = True, time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.request()
            _write_stderr(_NOTICE)
        elif time.monotonic() - self._first_at >= _SAME_REQUEST_SECONDS:
            if sys.stderr.isatty():
                _write_stderr(_SHOW_CURSOR)  # a progress bar may have hidden it
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(signal.Signals(number))


def _write_stderr(text: str) -> None:
    """Write past Python's buffers, which the interrupted code may be in the middle of using."""
    with contextlib.suppress(OSError):  # a closed terminal must not stop the stopping
        os.write(2, text.encode())
