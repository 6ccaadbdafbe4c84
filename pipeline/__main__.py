"""`python -m pipeline train`, `generate`, `cache`, `plan` and `smoke`: arguments in, exit code out.

0 done, 2 bad configuration or data, 3 environment not fit, 4 verification failed, 5 interrupted but resumable.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from pipeline import commands
from pipeline.smoke import smoke
from pipeline.stages import STAGES, one_line

_INTERRUPTED = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code. Errors that a person can mend are one line on stderr; --debug adds the traceback."""
    options = _parse(arguments)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        if options.command == "train":
            return commands.train(
                Path(options.config),
                options.overrides,
                only=options.stage,
                start_from=options.start_from,
                force=options.force,
            )
        if options.command == "cache":
            move = commands.export_cache if options.export_to else commands.import_cache
            return move(Path(options.config), options.overrides, options.export_to or options.import_from)
        if options.command == "needs":
            path = Path(options.config) if options.config else None
            return commands.needs(path, options.overrides, run=options.run or "", again=options.again)
        if options.command == "rank":
            return commands.rank(options.run, _explained, started_by_train=options.started_by_train)
        if options.command == "smoke":
            return smoke(options.device, options.json)
        if options.command == "plan":
            return _plan(options)
        if options.command in ("export", "import", "serve-command"):
            return _interchange(options)
        decoding = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "block_length")
        return commands.generate(options.run, options.prompt, {name: getattr(options, name) for name in decoding})
    except BaseException as error:
        if isinstance(error, BrokenPipeError):
            _drop(sys.stdout)
        code = _exit_code(error)
        if options.debug:
            traceback.print_exc()
        elif code is None:
            raise
        _say(_message(error))
        return 1 if code is None else code
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interchange(options: argparse.Namespace) -> int:
    from pipeline import interchange  # brings torch

    if options.command == "export":
        return interchange.export_drafter(options.drafter, options.to, options.out, options.target)
    if options.command == "import":
        return interchange.import_drafter(
            options.drafter, options.out, reading=options.reading, target=options.target, config=options.config
        )
    return interchange.serve_command(options.drafter, options.engine, options.target)


def _plan(options: argparse.Namespace) -> int:
    from pipeline.plan import command  # brings torch

    if options.check:
        return command.check()
    names = ("gpu", "gpus", "shape", "samples", "prompt_tokens", "answer_tokens", "epochs", "json")
    return command.plan(Path(options.config), options.overrides, **{name: getattr(options, name) for name in names})


def _explained(error: BaseException) -> tuple[int | None, str]:
    return _exit_code(error), _message(error)


def _exit_code(error: BaseException) -> int | None:
    """Return the exit code of an error that one line explains, None for one that is our own fault."""
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return 1
    if _out_of_memory(error) or (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG):
        return 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return 3
    return None


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted. The same command goes on from the last finished stage or checkpoint."
    if isinstance(error, BrokenPipeError):
        return "the reader of the output went away."
    if _out_of_memory(error):
        reason = " ".join(str(error).split())[:160]
        fix = "Lower train.micro_batch, data.generate_batch, data.buckets or drafter.block_size."
        return f"out of memory ({reason}). {fix}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:60]}...: the name is too long. Choose a shorter one."
    if isinstance(error, OSError) and not hasattr(error, "exit_code"):
        place = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "Make room" if full else "Make it writable, or choose another place"
        what = (error.strerror or str(error)).lower()
        return f"{place}{what}. {fix} (DFLASH_CACHE, DFLASH_RUNS) and run the command again."
    return one_line(error)


def _out_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch could not allocate; known by name, since torch is not imported here."""
    by_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and by_torch)


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Send a stream whose reader is gone to nowhere; Python flushes it once more at exit and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminate(number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C; a stage that can save first has its own handler (pipeline.interrupts)."""
    raise KeyboardInterrupt


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline", description="Train a DFlash drafter and prove what it does."
    )
    commands_parser = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="train | generate | export | import | serve-command | cache | plan | smoke | needs | rank",
    )

    train = commands_parser.add_parser("train", help="cache, train and verify; finished stages are skipped")
    train.add_argument("--config", required=True, metavar="FILE", help="a preset of configs/, or one of your own")
    train.add_argument("--stage", choices=STAGES, help="run this stage alone")
    train.add_argument("--from", dest="start_from", choices=STAGES, help="run this stage and the later ones again")
    train.add_argument("--force", action="store_true", help="run finished stages again, from nothing")
    train.add_argument("--debug", action="store_true", help="show the traceback of an error")
    train.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings over those of the file")

    generate = commands_parser.add_parser("generate", help="decode a prompt with a run's drafter")
    generate.add_argument("--run", required=True, metavar="RUN", help="a run's folder or id, or runs/latest")
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="default 64")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    generate.add_argument("--top-k", type=_positive, metavar="K", help="sample among the K likeliest tokens")
    generate.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens that hold P")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling, default 0")
    generate.add_argument(
        "--block-length", type=_block_length, default="full", metavar="K", help="tokens to draft, full or adaptive"
    )
    generate.add_argument("--debug", action="store_true", help="show the traceback of an error")

    cache = commands_parser.add_parser("cache", help="carry a compile cache to another host or an image")
    direction = cache.add_mutually_exclusive_group(required=True)
    direction.add_argument("--export", dest="export_to", type=Path, metavar="FILE", help="write it into FILE (tar)")
    direction.add_argument("--import", dest="import_from", type=Path, metavar="FILE", help="take it from FILE")
    cache.add_argument("--config", required=True, metavar="FILE", help="what it was, or will be, trained with")
    cache.add_argument("--debug", action="store_true", help="show the traceback of an error")
    cache.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings over those of the file")

    needs = commands_parser.add_parser("needs", help="print as JSON what a run reads here and what it would download")
    source = needs.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="of a run to come")
    source.add_argument("--run", metavar="RUN", help="a finished run, to decode with")
    needs.add_argument("--again", action="store_true", help="the cache stage will run even if it is finished")
    needs.add_argument("--debug", action="store_true", help="show the traceback of an error")
    needs.add_argument("overrides", nargs="*", metavar="section.field=value")

    smoke_parser = commands_parser.add_parser("smoke", help="see in a minute whether everything works here; no network")
    smoke_parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    smoke_parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    smoke_parser.add_argument("--debug", action="store_true", help="show the traceback of an error")

    rank = commands_parser.add_parser("rank", help="be one process of a training, for torchrun")
    # By place: torchrun would take a --run for its own --run-path.
    rank.add_argument("run", metavar="RUN", help="a run's folder or id, its cache stage finished")
    rank.add_argument("--started-by-train", action="store_true", help=argparse.SUPPRESS)
    rank.add_argument("--debug", action="store_true", help="show the traceback of an error")

    _add_plan(commands_parser)
    _add_interchange(commands_parser)

    # argparse stops taking positional arguments at the first option after them; overrides may stand anywhere.
    options, rest = parser.parse_known_args(arguments)
    wrong = [text for text in rest if text.startswith("-") or "=" not in text or not hasattr(options, "overrides")]
    if wrong:
        parser.error(f"unknown argument {wrong[0]!r}; see python -m pipeline {options.command} --help")
    if hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *rest]
    return options


def _add_plan(commands_parser: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands_parser.add_parser("plan", help="say what a run would take: hours, memory, GPUs")
    what = plan.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="of the run")
    what.add_argument("--check", action="store_true", help="compare the model with what was measured instead")
    plan.add_argument("--gpu", default="h200", metavar="G", help="h200 (default), h100, a100, b200; or G,matmul=...")
    plan.add_argument("--gpus", type=_positive, metavar="N", help="default: those that the configuration names")
    plan.add_argument("--shape", default="", metavar="S", help="the target's: qwen3-8b, or layers=36,hidden=4096,...")
    plan.add_argument("--samples", type=_positive, metavar="N", help="default: data.train's counts")
    plan.add_argument("--prompt-tokens", type=_positive, metavar="N", help="mean; default: data.max_prompt_tokens")
    plan.add_argument("--answer-tokens", type=_positive, metavar="N", help="mean; default: data.max_answer_tokens")
    plan.add_argument("--epochs", type=_positive, metavar="N", help="instead of train.steps")
    plan.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to FILE")
    plan.add_argument("--debug", action="store_true", help="show the traceback of an error")
    plan.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings over those of the file")


def _add_interchange(commands_parser: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands_parser.add_parser("export", help="write a drafter in the format of another project")
    export.add_argument("drafter", metavar="RUN_OR_FOLDER")
    export.add_argument("--to", required=True, metavar="FORMAT", help="zlab or speculators")
    export.add_argument("--out", required=True, metavar="FOLDER", help="new, or an earlier export")
    read = commands_parser.add_parser("import", help="take in another project's drafter, for train.init_from")
    read.add_argument("drafter", metavar="FOLDER", help="or a weights file")
    read.add_argument("--out", required=True, metavar="FOLDER", help="new, or an earlier import")
    read.add_argument("--reading", default="", metavar="PROJECT", help="whose meaning a silent sliding layer has")
    read.add_argument("--config", default="", metavar="FILE", help="config.json of weights that come without one")
    serve = commands_parser.add_parser("serve-command", help="print the command line that serves a drafter")
    serve.add_argument("drafter", metavar="RUN_OR_FOLDER")
    serve.add_argument("--engine", default="vllm", metavar="ENGINE", help="vllm (default) or sglang")
    for parser in (export, read, serve):
        parser.add_argument(
            "--target", default="", metavar="T", help="its target: a name, a folder or OWNER/NAME@COMMIT"
        )
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _block_length(text: str) -> str:
    return text if text in ("full", "adaptive") else str(_positive(text))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _leave(code: int) -> NoReturn:
    """End without waiting for threads: one of a rank's may be in a collective whose partners are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        try:
            _leave(main())
        except Exception:
            traceback.print_exc()
            _leave(1)
    sys.exit(main())
