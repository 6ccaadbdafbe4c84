"""The project's front door: `invoke --list`. Thin tasks; the work is in env/ and pipeline/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from invoke import Collection, Context, task

from env.build import build as build_image
from env.build import building_engine, checked_base
from env.cache_budget import clean as clean_cache
from env.engines import ENGINES
from env.errors import EnvError
from env.foreground import run_foreground
from env.image import describe
from env.locks import check_locks, compile_locks
from env.place import in_our_image, run_name
from env.reproduce import check_same_twice
from env.rootfs import write_rootfs
from env.starting import ROOT, caches, end, locked_python, one_line_errors, options, run_placed, run_python, say

_WHERE = {"in": "image or venv; default: the image when one of this checkout is built"}


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
    overrides = list(set_ or [])
    command = ["train", "--config", config, *options(stage=stage, from_=from_stage, force=force, debug=debug)]
    ask = ["--config", config, *overrides, *options(again=force or "cache" in (stage, from_stage))]
    run_placed([*command, *overrides], where=in_, ask=ask, named=[config])


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
    name = run_name(run, ROOT, caches())
    command = ["generate", "--run", name, "--prompt", prompt, "--max-new-tokens", str(max_new_tokens)]
    command += options(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, block_length=block_length)
    run_placed(command, where=in_, ask=["--run", name], named=[name])


@task(help={"device": "cpu or cuda; default: the GPU if there is one", "json": "also write the results here", **_WHERE})
def smoke(c: Context, device: str = "", json: str = "", in_: str = "auto") -> None:
    """Try everything once on a tiny model: doctor, kernels, three training steps, verify."""
    run_placed(["smoke", *options(device=device)], where=in_, writes=("--json", json))


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
    with one_line_errors():
        found = building_engine(engine)
        kind = checked_base(base)
        manifest = build_image(ROOT, caches(), found, base=kind, say=say)
        say(describe(manifest))
        if check:
            check_same_twice(ROOT, caches(), found, base=kind, say=say)
        if rootfs:
            write_rootfs(found, manifest["name"], ROOT / Path(rootfs).expanduser(), say=say)


@task
def shell(c: Context) -> None:
    """Open a shell in the image, with the cache and the runs."""
    with one_line_errors():
        if in_our_image():
            raise EnvError("this is the image", where="invoke shell", fix="Type on.")
    run_placed(["bash"], where="image", keyboard=True)


@task(
    help={
        "path": "file or folder of tests",
        "k": "only tests whose names match this pytest expression",
        "gpu": "the tests that need a GPU, instead of all others",
        "image": "the tests of the built image, instead of all others",
        "lock": "environment: dev, or next to try the newest torch",
        "jobs": "files of tests at a time; those of the GPU and of the image run one by one",
    }
)
def test(
    c: Context,
    path: str = "tests",
    k: str = "",
    gpu: bool = False,
    image: bool = False,
    lock: str = "dev",
    jobs: int = 2,
) -> None:
    """Run the tests in the locked development environment."""
    chosen = "gpu" if gpu else "image" if image else "not gpu and not image"
    at_once = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 and not gpu and not image else []
    run_python(["-m", "pytest", path, "-m", chosen, *at_once, *(["-k", k] if k else [])], lock=lock)


@task(
    help={
        "dry-run": "list what is there and what would go; remove nothing",
        "everything": "remove every key that no process uses",
    }
)
def clean(c: Context, dry_run: bool = False, everything: bool = False) -> None:
    """Bring the compile cache within its budget; refuses while a process compiles."""
    with one_line_errors():
        clean_cache(caches().compile, say, dry_run=dry_run, everything=everything)


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
    archive = str((ROOT / Path(import_).expanduser()).absolute()) if import_ else ""
    command = ["cache", "--config", config, *(set_ or []), *options(import_=archive)]
    run_placed(command, where=in_, named=[config, *([archive] if archive else [])], writes=("--export", export))


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
    sizes = options(shape=shape, samples=samples, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
    command = ["--config", config, *options(gpu=gpu, gpus=gpus, json=json), *sizes, *options(epochs=epochs)]
    run_python(["-m", "pipeline", "plan", *(["--check"] if check else [*command, *(set_ or [])])])


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
    run_python(["-m", "pipeline", "export", drafter, *options(to=to, out=out, target=target)])


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
    run_python(["-m", "pipeline", "import", folder, *options(out=out, reading=reading, target=target, config=config)])


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
    run_python(["-m", "pipeline", "serve-command", drafter, *options(engine=engine, target=target)])


@task(
    positional=["first", "second"],
    help={"first": "run folder, its id, or runs/latest", "second": "the other run", "json": "print JSON"},
)
def diff(c: Context, first: str, second: str, json: bool = False) -> None:
    """Say in words what differs between two runs."""
    run_python(["-m", "env.diff", first, second, *options(json=json)])


@task(help={"json": "also write the findings to this file", "lock": "lock to compare with", **_WHERE})
def doctor(c: Context, json: str = "", lock: str = "", in_: str = "auto") -> None:
    """Compare the environment with the lock; say what would go wrong on this machine."""
    run_placed(["doctor", *options(lock=lock)], where=in_, writes=("--json", json))


@task
def fingerprint(c: Context) -> None:
    """Print everything needed to repeat a run here, as JSON."""
    run_python(["-m", "env.fingerprint"])


@task
def lint(c: Context) -> None:
    """Check style and formatting (ruff) and the Dockerfile (hadolint)."""
    run_python(["-m", "ruff", "check", "."], lock="dev")
    run_python(["-m", "ruff", "format", "--check", "."], lock="dev")
    with one_line_errors():
        hadolint = locked_python("dev").with_name("hadolint")
    end(run_foreground([str(hadolint), "Dockerfile"], cwd=ROOT))


@task
def typecheck(c: Context) -> None:
    """Check types (mypy)."""
    run_python(["-m", "mypy"], lock="dev")


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
    counts = options(runs=str(runs), jobs=str(jobs))
    run_python(["-m", "dflash.compile.lab", *counts, *options(json=json, device=device)], lock=lock)


@task(help={"json": "also write the results here", "device": "auto, cpu or cuda", "sizes": "reference, small or all"})
def bench(c: Context, json: str = "", device: str = "auto", sizes: str = "") -> None:
    """Time training steps, as shares of what this machine's own products and copies reach."""
    run_python(["-m", "benchmarks.step", *options(json=json, device=device, sizes=sizes)])


@task(
    help={
        "check": "change nothing; fail if a lock is not what its .in file gives",
        "next": "move next.txt to the newest versions on the index",
    }
)
def lock(c: Context, check: bool = False, next: bool = False) -> None:
    """Compile lockfiles/*.in into hashed locks, or check them."""
    with one_line_errors():
        if check:
            check_locks(ROOT)
            say("The locks are what their .in files give.")
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
