"""How a task starts its program and how it ends: with the program's exit code, or in one line.

The functions that start something end the task by SystemExit, which Invoke lets through; nothing here needs Invoke.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from env.caches import CacheDirs
from env.entrypoint import command_line
from env.errors import EnvError
from env.foreground import run_foreground
from env.place import choose_place, in_our_image, run_there
from env.venv import ensure_runtime

ROOT = Path(__file__).resolve().parent.parent


def caches() -> CacheDirs:
    """Return the places that the environment chooses."""
    return CacheDirs.from_environment(ROOT)


def say(line: str) -> None:
    """Print a line at once, before what the program itself prints."""
    print(line, flush=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn EnvError into one line and exit code 3, without a traceback; Ctrl-C into one line and exit code 5."""
    try:
        yield
    except EnvError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("Interrupted before the program started; nothing is half-written. Run it again.", file=sys.stderr)
        raise SystemExit(5) from None


def options(**given: str | bool) -> list[str]:
    """Return the options that have a value as words: top_k="5" as --top-k 5, force=True as --force.

    An underscore at the end is left out: from_="train" is --from train.
    """
    words = []
    for name, value in given.items():
        if value:
            words.append(f"--{name.rstrip('_').replace('_', '-')}")
        if value and value is not True:
            words.append(value)
    return words


def output_path(text: str) -> Path:
    """Return the absolute path of a file that a command writes, in a folder that a container can be given.

    Raises EnvError.
    """
    path = (ROOT / Path(text).expanduser()).absolute()
    if not path.parent.is_dir():
        raise EnvError("no such folder", where=str(path.parent), fix="Make it first.")
    if path.parent == Path("/"):
        raise EnvError("the root cannot be given to a container", where=str(path), fix="Name a file in a folder.")
    return path


def locked_python(lock: str = "runtime") -> Path:
    """Return the Python of a lock's environment, made if it is not there; of this one in our image. Raises EnvError."""
    return Path(sys.executable) if in_our_image() else ensure_runtime(ROOT, caches(), lock=lock, say=say)


def end(code: int) -> None:
    """End the task with a program's exit code unless that is 0."""
    if code:
        raise SystemExit(code)


def run_python(arguments: Sequence[str], *, lock: str = "runtime") -> None:
    """Run the Python of a lock's environment in the foreground."""
    with one_line_errors():
        python = locked_python(lock)
    end(run_foreground([str(python), *arguments], cwd=ROOT))


def run_placed(
    command: Sequence[str],
    *,
    where: str,
    ask: Sequence[str] = (),
    named: Sequence[str] = (),
    writes: tuple[str, str] = ("", ""),
    keyboard: bool = False,
) -> None:
    """Run a command of the image's entry point wherever `where` says: "auto", "image" or "venv".

    ask, named   see env.place.run_there
    writes       an option and the file that it names, e.g. ("--json", "out.json"); no option if the file is ""
    """
    with one_line_errors():
        option, file = writes
        outputs = [output_path(file)] if file else []
        line = [*command, *(word for path in outputs for word in (option, str(path)))]
        code = run_there(
            choose_place(where, ROOT, caches()),
            line,
            command_line(line)[1:],
            root=ROOT,
            caches=caches(),
            say=say,
            ask=ask,
            named=named,
            outputs=[path.parent for path in outputs],
            keyboard=keyboard,
        )
    end(code)
