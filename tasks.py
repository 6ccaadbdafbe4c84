"""The project's front door: `invoke --list`. Thin tasks; the work is in env/ and pipeline/."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from invoke import Collection, Context, Exit, task

from env.build import build as build_image
from env.build import checked_base, host_engine
from env.cache_budget import clean as clean_cache
from env.caches import CacheDirs
from env.engines import ENGINES
from env.errors import EnvError
from env.foreground import run_foreground
from env.image import describe
from env.locks import check_locks, compile_locks
from env.place import choose_place, in_our_image, run_name, run_there
from env.reproduce import check_same_twice
from env.rootfs import write_rootfs
from env.venv import ensure_runtime

ROOT = Path(__file__).resolve().parent
_WHERE = {"in": "image or venv; default: the image when one of this checkout is built"}


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn EnvError into Invoke's Exit: one line, exit code 3, no traceback."""
    try:
        yield
    except EnvError as error:
        raise Exit(str(error), code=error.exit_code) from None
    except KeyboardInterrupt:
        raise Exit("Interrupted before the program started; nothing is half-written. Run it again.", code=5) from None


def _caches() -> CacheDirs:
    return CacheDirs.from_environment(ROOT)


def _output_folder(text: str) -> tuple[str, list[Path]]:
    """Return (the file's absolute path, [its folder]) of a file that a command writes. Raises EnvError."""
    path = (ROOT / Path(text).expanduser()).absolute()
    if not path.parent.is_dir():
        raise EnvError("no such folder", where=str(path.parent), fix="Make it first.")
    if path.parent == Path("/"):
        raise EnvError("the root cannot be given to a container", where=str(path), fix="Name a file in a folder.")
    return str(path), [path.parent]


def _say(line: str) -> None:
    print(line, flush=True)


def _options(**given: str) -> list[str]:
    """Return the options that have a value as words: top_k="5" as --top-k 5."""
    return [word for name, value in given.items() if value for word in (f"--{name.replace('_', '-')}", value)]


def _end(code: int) -> None:
    if code:
        raise Exit(code=code)


def _run(arguments: list[str], *, lock: str = "runtime") -> None:
    """Run the environment's Python in the foreground and end with its exit code unless that is 0."""
    with _one_line_errors():
        python = sys.executable if in_our_image() else str(ensure_runtime(ROOT, _caches(), lock=lock, say=_say))
    _end(run_foreground([python, *arguments], cwd=ROOT))


def _run_placed(command: Sequence[str], module: Sequence[str], *, where: str, **how: Any) -> None:
    """Run a command of the image's entry point, or the same of Python, wherever `where` says."""
    with _one_line_errors():
        place = choose_place(where, ROOT, _caches())
        code = run_there(place, command, module, root=ROOT, caches=_caches(), say=_say, **how)
    _end(code)


@task(
    help={
        "config": "preset in configs/, one file per run",
        "stage": "run only this stage: cache, train or verify",
        "from-stage": "run this stage and the later ones again, even if finished",
        "force": "run finished stages again",
        "set": "override, e.g. --set train.steps=50; may be repeated",
        "debug": "show tracebacks",
        **_WHERE,
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
    in_: str = "auto",
) -> None:
    """Train a drafter: cache, train, verify. Resumes what was interrupted."""
    arguments = ["train", "--config", config, *_options(stage=stage)]
    arguments += ["--from", from_stage] if from_stage else []
    arguments += ["--force"] if force else []
    arguments += ["--debug"] if debug else []
    overrides = list(set_ or [])
    command = [*arguments, *overrides]
    again = force or "cache" in (stage, from_stage)
    ask = ["--config", config, *overrides, *(["--again"] if again else [])]
    _run_placed(command, ["-m", "pipeline", *command], where=in_, ask=ask, named=[config])


@task(
    help={
        "prompt": "the user's message",
        "run": "run folder with an exported drafter",
        "max-new-tokens": "where to stop at the latest",
        "temperature": "0 (default) decodes greedily; above, tokens are sampled, as the target alone would",
        "top-k": "sample among the K likeliest tokens",
        "top-p": "sample among the likeliest tokens that hold the share P",
        "seed": "of the sampling",
        "block-length": "tokens drafted for each call of the target: a number, full or adaptive",
        **_WHERE,
    }
)
def generate(
    c: Context,
    prompt: str,
    run: str = "runs/latest",
    max_new_tokens: int = 64,
    temperature: str = "",
    top_k: str = "",
    top_p: str = "",
    seed: str = "",
    block_length: str = "",
    in_: str = "auto",
) -> None:
    """Answer a prompt with a run's drafter; show tokens per target call."""
    name = run_name(run, ROOT, _caches())
    command = ["generate", "--run", name, "--prompt", prompt, "--max-new-tokens", str(max_new_tokens)]
    command += _options(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, block_length=block_length)
    _run_placed(command, ["-m", "pipeline", *command], where=in_, ask=["--run", name], named=[name])


@task(help={"device": "cpu or cuda; default: the GPU if there is one", "json": "also write the results here", **_WHERE})
def smoke(c: Context, device: str = "", json: str = "", in_: str = "auto") -> None:
    """Try everything once on a tiny model: doctor, kernels, three training steps, verify."""
    command = ["smoke", *_options(device=device)]
    outputs: list[Path] = []
    if json:
        with _one_line_errors():
            path, outputs = _output_folder(json)
        command += ["--json", path]
    _run_placed(command, ["-m", "pipeline", *command], where=in_, outputs=outputs)


@task(
    help={
        "engine": f"{', '.join(ENGINES)}; default: the first that works",
        "base": "debian: made here from packages; registry: pulled by digest; default: debian where mmdebstrap is",
        "check": "build everything again from nothing and compare, naming the first file that differs",
        "rootfs": "also write the image's file system to this tar, for hosts without an engine",
    }
)
def build(c: Context, engine: str = "", base: str = "auto", check: bool = False, rootfs: str = "") -> None:
    """Build the image of this checkout, with a manifest of what is in it."""
    with _one_line_errors():
        found = host_engine(engine)
        if found is None:
            what = f"no container engine ({', '.join(ENGINES)}) works on this host"
            raise EnvError(what, where="invoke build", fix="Install docker or podman; invoke train needs neither.")
        kind = checked_base(base)
        manifest = build_image(ROOT, _caches(), found, base=kind, say=_say)
        _say(describe(manifest))
        if check:
            check_same_twice(ROOT, _caches(), found, base=kind, say=_say)
        if rootfs:
            write_rootfs(found, manifest["name"], ROOT / Path(rootfs).expanduser(), say=_say)


@task
def shell(c: Context) -> None:
    """Open a shell in the image, with the cache and the runs."""
    with _one_line_errors():
        place = choose_place("image", ROOT, _caches())
        if place.kind == "here":
            raise EnvError("this is the image", where="invoke shell", fix="Type on.")
        code = run_there(place, ["bash"], [], root=ROOT, caches=_caches(), say=_say, keyboard=True)
    _end(code)


@task(
    help={
        "path": "file or folder of tests",
        "k": "only tests whose names match this pytest expression",
        "gpu": "the tests that need a GPU, instead of all others",
        "image": "the tests of the built image, instead of all others",
        "lock": "environment: dev, or next to try the newest torch",
    }
)
def test(
    c: Context, path: str = "tests", k: str = "", gpu: bool = False, image: bool = False, lock: str = "dev"
) -> None:
    """Run the tests in the locked development environment."""
    chosen = "gpu" if gpu else "image" if image else "not gpu and not image"
    arguments = ["-m", "pytest", path, "-m", chosen]
    _run([*arguments, *(["-k", k] if k else [])], lock=lock)


@task(
    help={
        "dry-run": "list what is there and what would go; remove nothing",
        "everything": "remove every key that no process uses",
    }
)
def clean(c: Context, dry_run: bool = False, everything: bool = False) -> None:
    """Bring the compile cache within its budget; refuses while a process compiles."""
    with _one_line_errors():
        clean_cache(_caches().compile, _say, dry_run=dry_run, everything=everything)


@task(
    name="cache",
    help={
        "export": "write the compile cache of the configuration into this file",
        "import": "take it from this file, checked",
        "config": "preset in configs/",
        "set": "override; may be repeated",
        **_WHERE,
    },
    iterable=["set_"],
)
def move_cache(
    c: Context,
    export: str = "",
    import_: str = "",
    config: str = "configs/quickstart.yaml",
    set_: Any = None,
    in_: str = "auto",
) -> None:
    """Carry a warm compile cache to another host or into an image."""
    overrides = list(set_ or [])
    command = ["cache", "--config", config, *overrides]
    named, outputs = [config], list[Path]()
    if export:
        with _one_line_errors():
            path, outputs = _output_folder(export)
        command += ["--export", path]
    if import_:
        path = str((ROOT / Path(import_).expanduser()).absolute())
        command += ["--import", path]
        named.append(path)
    _run_placed(command, ["-m", "pipeline", *command], where=in_, named=named, outputs=outputs)


@task(
    help={
        "config": "preset in configs/",
        "gpus": "how many; default: those that the configuration names",
        "gpu": "h200, h100, a100 or b200, with rates of your own: h200,link=50 (GB/s), matmul= (TFLOP/s), ...",
        "shape": "of a target whose config.json is not here: qwen3-8b, or layers=36,hidden=4096,...",
        "samples": "default: the prompts of the configuration",
        "prompt-tokens": "mean of a sample; default: the most that are allowed",
        "answer-tokens": "the same of its answer",
        "epochs": "instead of train.steps",
        "set": "override; may be repeated",
        "json": "also write the plan here",
        "check": "instead, compare the model with what was measured",
    },
    iterable=["set_"],
)
def plan(
    c: Context,
    config: str = "configs/smollm2-gpu.yaml",
    gpus: str = "",
    gpu: str = "h200",
    shape: str = "",
    samples: str = "",
    prompt_tokens: str = "",
    answer_tokens: str = "",
    epochs: str = "",
    set_: Any = None,
    json: str = "",
    check: bool = False,
) -> None:
    """Say what a run would take: hours, memory, how many GPUs as targets and as drafters, what limits it."""
    if check:
        _run(["-m", "pipeline", "plan", "--check"])
        return
    sizes = _options(
        shape=shape, samples=samples, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, epochs=epochs
    )
    command = ["plan", "--config", config, *_options(gpu=gpu, gpus=gpus, json=json), *sizes]
    _run(["-m", "pipeline", *command, *(set_ or [])])


@task(
    positional=["drafter"],
    help={
        "drafter": "run folder, its id, runs/latest, or a drafter's folder",
        "to": "zlab (vLLM, SGLang, z-lab, SpecForge) or speculators",
        "out": "folder to write: new, or an earlier export",
        "target": "its target, where the drafter is a folder: a name, a folder or OWNER/NAME@COMMIT",
    },
)
def export(c: Context, drafter: str, out: str, to: str = "zlab", target: str = "") -> None:
    """Write a drafter in the format of another project."""
    _run(["-m", "pipeline", "export", drafter, *_options(to=to, out=out, target=target)])


@task(
    name="import",
    positional=["folder"],
    help={
        "folder": "of z-lab, speculators, SpecForge, TorchSpec, Model-Optimizer or Automodel, or a weights file",
        "out": "folder to write, for train.init_from",
        "reading": "zlab, specforge, speculators, model-optimizer or automodel: what a silent sliding layer means",
        "target": "its target, for what its files leave out: a name, a folder or OWNER/NAME@COMMIT",
        "config": "config.json of weights that come without one",
    },
)
def import_drafter(c: Context, folder: str, out: str, reading: str = "", target: str = "", config: str = "") -> None:
    """Take in another project's drafter."""
    _run(["-m", "pipeline", "import", folder, *_options(out=out, reading=reading, target=target, config=config)])


@task(
    name="serve-command",
    positional=["drafter"],
    help={
        "drafter": "run folder, its id, runs/latest, or a drafter's folder",
        "engine": "vllm or sglang",
        "target": "its target, where nothing in the folder says it",
    },
)
def serve_command(c: Context, drafter: str, engine: str = "vllm", target: str = "") -> None:
    """Print the command line that serves a drafter, with what the engine would compute otherwise."""
    _run(["-m", "pipeline", "serve-command", drafter, *_options(engine=engine, target=target)])


@task(
    positional=["first", "second"],
    help={"first": "run folder, its id, or runs/latest", "second": "the other run", "json": "print JSON"},
)
def diff(c: Context, first: str, second: str, json: bool = False) -> None:
    """Say in words what differs between two runs."""
    _run(["-m", "env.diff", first, second, *(["--json"] if json else [])])


@task(help={"json": "also write the findings to this file", "lock": "lock to compare with", **_WHERE})
def doctor(c: Context, json: str = "", lock: str = "", in_: str = "auto") -> None:
    """Compare the environment with the lock; say what would go wrong on this machine."""
    options = ["--lock", lock] if lock else []
    outputs: list[Path] = []
    if json:
        with _one_line_errors():
            path, outputs = _output_folder(json)
        options += ["--json", path]
    _run_placed(["doctor", *options], ["-m", "env.doctor", *options], where=in_, outputs=outputs)


@task
def fingerprint(c: Context) -> None:
    """Print everything needed to repeat a run here, as JSON."""
    _run(["-m", "env.fingerprint"])


@task
def lint(c: Context) -> None:
    """Check style and formatting (ruff) and the Dockerfile (hadolint)."""
    _run(["-m", "ruff", "check", "."], lock="dev")
    _run(["-m", "ruff", "format", "--check", "."], lock="dev")
    with _one_line_errors():
        hadolint = ensure_runtime(ROOT, _caches(), lock="dev", say=_say).with_name("hadolint")
    _end(run_foreground([str(hadolint), "Dockerfile"], cwd=ROOT))


@task
def typecheck(c: Context) -> None:
    """Check types (mypy)."""
    _run(["-m", "mypy"], lock="dev")


@task(
    help={
        "json": "also write the results to this file",
        "lock": "environment: runtime, or next to try the newest torch",
        "runs": "runs of each random case",
        "jobs": "runs of one case at a time",
        "device": "only cpu or only cuda",
    }
)
def race(c: Context, json: str = "", lock: str = "runtime", runs: int = 3, jobs: int = 1, device: str = "") -> None:
    """Show what threads and torch.compile do here, without the gate and with it."""
    arguments = ["-m", "dflash.compile.lab", "--runs", str(runs), "--jobs", str(jobs)]
    arguments += ["--json", json] if json else []
    _run([*arguments, *(["--device", device] if device else [])], lock=lock)


@task(help={"json": "also write the results here", "device": "auto, cpu or cuda", "sizes": "reference, small or all"})
def bench(c: Context, json: str = "", device: str = "auto", sizes: str = "") -> None:
    """Time training steps, as shares of what this machine's own products and copies reach."""
    _run(["-m", "benchmarks.step", *_options(json=json, device=device, sizes=sizes)])


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


namespace = Collection(
    *(
        train,
        generate,
        export,
        import_drafter,
        serve_command,
        smoke,
        build,
        shell,
        clean,
        move_cache,
        plan,
        race,
        bench,
    ),
    *(test, doctor, fingerprint, diff, lint, typecheck, lock),
)
