"""Real signals to real processes: what a handler does to its own process cannot be tried inside the test's."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.interrupts import StopRequest

ROOT = Path(__file__).resolve().parents[3]

_STEPS = """
import time
from pipeline.interrupts import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("requested", flush=True)
    {after}
print("left", flush=True)
time.sleep({linger})
"""


class Child:
    def __init__(self, after: str = "pass", linger: float = 0) -> None:
        script = _STEPS.format(after=after, linger=linger)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line + "\n"

    def end(self) -> tuple[int, str]:
        """Return the exit code and what went to stderr."""
        _, stderr = self.process.communicate(timeout=20)
        return self.process.returncode, stderr


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_for_a_stop_and_says_so_once(children: list[Child], number: signal.Signals) -> None:
    child = Child()
    children.append(child)
    child.expect("ready")
    child.process.send_signal(number)
    child.expect("requested")
    code, stderr = child.end()
    assert code == 0
    assert stderr == "stopping at the next step; press Ctrl-C again to end at once\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(children: list[Child], number: signal.Signals) -> None:
    child = Child(after="time.sleep(60)")
    children.append(child)
    child.expect("ready")
    child.process.send_signal(signal.SIGINT)
    child.expect("requested")
    time.sleep(0.6)  # longer than what counts as the same request
    child.process.send_signal(number)
    code, stderr = child.end()
    assert code == -number
    assert "Traceback" not in stderr


def test_a_signal_delivered_twice_at_once_is_one_request(children: list[Child]) -> None:
    """GNU timeout signals the process and then its group."""
    child = Child(after="time.sleep(1)")
    children.append(child)
    child.expect("ready")
    child.process.send_signal(signal.SIGINT)
    child.expect("requested")
    child.process.send_signal(signal.SIGINT)
    child.expect("left")
    assert child.end()[0] == 0


def test_the_handlers_of_before_are_back_afterwards(children: list[Child]) -> None:
    child = Child(linger=60)
    children.append(child)
    child.expect("ready")
    child.process.send_signal(signal.SIGTERM)
    child.expect("requested")
    child.expect("left")
    child.process.send_signal(signal.SIGINT)
    code, stderr = child.end()
    assert code == -signal.SIGINT  # Python's own handler raised, and the interpreter ended as by the signal
    assert "KeyboardInterrupt" in stderr


def test_handlers_are_restored_when_the_body_raises() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), StopRequest() as stop:
        assert signal.getsignal(signal.SIGINT) not in before
        assert not stop.requested
        raise ValueError("inside")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_other_than_the_main_one_is_refused() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with StopRequest():
                pass
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "only in the main thread" in str(errors[0])
