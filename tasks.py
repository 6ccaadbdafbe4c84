"""The project's front door: `invoke --list`. Thin tasks; the work is in env/ and pipeline/."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from invoke import Collection, Context, Exit, task

from env.caches import CacheDirs
from env.errors import EnvError
from env.foreground import run_foreground
from env.image import ENGINES, find_engine
from env.locks import check_locks, compile_locks
from env.venv import ensure_runtime, runtime_folder

ROOT = Path(__file__).resolve().parent


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn EnvError into Invoke's Exit: one line, exit code 3, no traceback."""
    try:
        yield
    except EnvError as error:
        raise Exit(str(error), code=error.exit_code) from None
    except KeyboardInterrupt:
        raise Exit("Interrupted before the program started; nothing is half-written. Run it again.", code=5) from None


def _in_our_image() -> bool:
    # Other containers are hosts like any other: only our image brings the locked packages with it.
    return os.environ.get("DFLASH_IN_IMAGE") == "1"


def _python(lock: str = "runtime") -> str:
    if _in_our_image():
        return sys.executable
    return str(ensure_runtime(ROOT, CacheDirs.from_environment(ROOT), lock=lock, say=_say))


def _say(line: str) -> None:
    print(line, flush=True)


def _run(arguments: list[str], *, lock: str = "runtime", announce: Callable[[], None] | None = None) -> None:
    """Run the environment's Python in the foreground and end with its exit code unless that is 0."""
    with _one_line_errors():
        if announce:
            announce()
        python = _python(lock)
    code = run_foreground([python, *arguments], cwd=ROOT)
    if code:
        raise Exit(code=code)


def _announce_environment() -> None:
    if _in_our_image():
        return
    folder = runtime_folder(ROOT, CacheDirs.from_environment(ROOT))
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    engine = find_engine()
    if engine is None:
        _say(f"No container engine ({', '.join(ENGINES)}) on this host: using the locked environment {shown}")
    else:
        _say(f"Found {engine}, but no image of this commit is built: using the locked environment {shown}")


@task(
    help={
        "config": "preset in configs/, one file per run",
        "stage": "run only this stage: cache, train or verify",
        "from-stage": "run this stage and the later ones again, even if finished",
        "force": "run finished stages again",
        "set": "override, e.g. --set train.steps=50; may be repeated",
        "debug": "show tracebacks",
    },
    iterable=["set_"],
)
def train(
    c: Context,
    config: str = "configs/quickstart.yaml",
    stage: str = "",
    from_stage: str = "",
    force: bool = False,
    set_: Any = None,
    debug: bool = False,
) -> None:
    """Train a drafter: cache, train, verify. Resumes what was interrupted."""
    arguments = ["-m", "pipeline", "train", "--config", config]
    arguments += ["--stage", stage] if stage else []
    arguments += ["--from", from_stage] if from_stage else []
    arguments += ["--force"] if force else []
    arguments += ["--debug"] if debug else []
    _run([*arguments, *(set_ or [])], announce=_announce_environment)


@task(
    help={
        "prompt": "the user's message",
        "run": "run folder with an exported drafter",
        "max-new-tokens": "where to stop at the latest",
    }
)
def generate(c: Context, prompt: str, run: str = "runs/latest", max_new_tokens: int = 64) -> None:
    """Answer a prompt with a run's drafter; show tokens per target call."""
    _run(["-m", "pipeline", "generate", "--run", run, "--prompt", prompt, "--max-new-tokens", str(max_new_tokens)])


@task(
    help={
        "path": "file or folder of tests",
        "k": "only tests whose names match this pytest expression",
        "gpu": "the tests that need a GPU, instead of all others",
        "lock": "environment: dev, or next to try the newest torch",
    }
)
def test(c: Context, path: str = "tests", k: str = "", gpu: bool = False, lock: str = "dev") -> None:
    """Run the tests in the locked development environment."""
    arguments = ["-m", "pytest", path, "-m", "gpu" if gpu else "not gpu"]
    _run([*arguments, *(["-k", k] if k else [])], lock=lock)


@task(help={"json": "also write the findings to this file", "lock": "lock to compare with"})
def doctor(c: Context, json: str = "", lock: str = "") -> None:
    """Compare this environment with the lock; say what would go wrong."""
    _run(["-m", "env.doctor", *(["--json", json] if json else []), *(["--lock", lock] if lock else [])])


@task
def fingerprint(c: Context) -> None:
    """Print everything needed to repeat a run here, as JSON."""
    _run(["-m", "env.fingerprint"])


@task
def lint(c: Context) -> None:
    """Check style and formatting (ruff)."""
    _run(["-m", "ruff", "check", "."], lock="dev")
    _run(["-m", "ruff", "format", "--check", "."], lock="dev")


@task
def typecheck(c: Context) -> None:
    """Check types (mypy)."""
    _run(["-m", "mypy"], lock="dev")


@task(
    help={
        "json": "also write the results to this file",
        "lock": "environment: runtime, or next to try the newest torch",
        "runs": "runs of each random case",
        "device": "only cpu or only cuda",
    }
)
def race(c: Context, json: str = "", lock: str = "runtime", runs: int = 3, device: str = "") -> None:
    """Show what threads and torch.compile do here, without the gate and with it."""
    arguments = ["-m", "dflash.compile.lab", "--runs", str(runs)]
    arguments += ["--json", json] if json else []
    _run([*arguments, *(["--device", device] if device else [])], lock=lock)


@task(
    help={
        "check": "change nothing; fail if a lock is not what its .in file gives",
        "next": "move next.txt to the newest versions on the index",
    }
)
def lock(c: Context, check: bool = False, next: bool = False) -> None:
    """Compile lockfiles/*.in into hashed locks, or check them."""
    with _one_line_errors():
        if check:
            check_locks(ROOT)
            _say("The locks are what their .in files give.")
        else:
            compile_locks(ROOT, upgrade=("next",) if next else ())


namespace = Collection(train, generate, race, test, doctor, fingerprint, lint, typecheck, lock)
