"""Speculative against plain greedy decoding of single prompts: tokens a second, steps, tau, and whether texts differ.

    python -m benchmarks.decode RUN [--source human-eval] [--prompts 40] [--max-new-tokens 128] [--json FILE]
    python -m benchmarks.decode --random-drafter --target smollm2-135m-instruct --source prompts.jsonl

Both ways are pipeline.static_speculation's, so the same code: one prompt after another, static caches, CUDA graphs,
compiled on a GPU. Each prompt is decoded plainly and then speculatively. Times of decoding begin when the prompt has
been read, which gives the first token; "whole" times count the prompt too. A random drafter shows what a step costs and
so the tau that pays; stop tokens are passed over then. Exit code 4 when something compiled after the warm-up, or, in
float32, when a text differs: rounding moves near ties in bfloat16, and there they are counted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.header import ROOT, check_record, header
from dflash.acceptance import pooled_tau
from dflash.checkpoint import load_drafter
from dflash.compile.counters import disk_counts
from dflash.config import DrafterConfig, spread_layer_ids
from dflash.decode import Decoded
from dflash.errors import DFlashError
from dflash.model import DFlashDraftModel
from env.caches import CacheDirs
from env.errors import EnvError
from pipeline.config import TargetConfig
from pipeline.data import prompt_len, read_samples
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.prompts import load_prompts
from pipeline.regenerate import stop_ids
from pipeline.rendering import render_prompt
from pipeline.runs import Run, find_run, read_manifest
from pipeline.static_decode import StaticDecoder
from pipeline.static_speculation import StaticSpeculator
from pipeline.targets import TargetFolder, load_target, load_tokenizer, resolve_target, target_config

RUN_SETS = ("held_out", "out_of_domain")


@dataclass(frozen=True)
class Timed:
    """One answer: what was decoded, seconds of reading the prompt and of writing the rest."""

    decoded: Decoded
    seconds_prompt: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second after the first, which comes with the prompt."""
        return (len(self.decoded.tokens) - 1) / self.seconds


@dataclass(frozen=True)
class Row:
    """What one set of prompts gave. Rates and ratios are of decoding, over all prompts together unless it says median;
    nan where no answer has a second token."""

    name: str
    prompts: int
    prompt_tokens: int
    tokens: int
    plain_rate: float
    speculative_rate: float
    ratio: float
    ratio_median: float
    ratio_whole: float
    """Of tokens a second with the reading of the prompts."""
    tau: float
    plain_ms: float
    """Milliseconds of a step, the mean."""
    speculative_ms: float
    break_even_tau: float
    """A speculative step in plain ones: tau has to be above it."""
    identical: int
    """Prompts whose two texts are the same."""
    first_difference: str
    all_ratios: tuple[float, ...]


def decode_timed(decoder: StaticSpeculator, prompt: Sequence[int], max_new_tokens: int) -> Timed:
    """Return one answer and its times; the device is idle before and after each."""

    def now() -> float:
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        return time.perf_counter()

    begin = now()
    decoder.read(prompt, max_new_tokens)
    middle = now()
    decoded = decoder.write()
    return Timed(decoded, middle - begin, now() - middle)


def compare(
    name: str,
    plain: StaticSpeculator,
    speculative: StaticSpeculator,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> Row:
    """Return the row of `prompts`, each decoded both ways."""
    pairs = [
        (decode_timed(plain, prompt, max_new_tokens), decode_timed(speculative, prompt, max_new_tokens))
        for prompt in prompts
    ]
    return summary(name, [len(prompt) for prompt in prompts], pairs)


def summary(name: str, prompt_lengths: Sequence[int], pairs: Sequence[tuple[Timed, Timed]]) -> Row:
    """Return the row of (plain, speculative) answers."""
    plain, speculative = zip(*pairs, strict=True)
    written = [pair for pair in pairs if min(len(side.decoded.tokens) for side in pair) > 1]
    ratios = [s.rate / p.rate for p, s in written]
    rates = [
        _over(sum(len(t.decoded.tokens) - 1 for t in side), sum(t.seconds for t in side))
        for side in (plain, speculative)
    ]
    whole = [
        _over(sum(len(t.decoded.tokens) for t in side), sum(t.seconds_prompt + t.seconds for t in side))
        for side in (plain, speculative)
    ]
    steps = [
        _over(1e3 * sum(t.seconds for t in side), sum(len(t.decoded.accepted) for t in side))
        for side in (plain, speculative)
    ]
    calls = [len(s.decoded.accepted) for s in speculative]
    different = [
        (index, next((k for k, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts))))
        for index, texts in enumerate((p.decoded.tokens, s.decoded.tokens) for p, s in pairs)
        if texts[0] != texts[1]
    ]
    return Row(
        name=name,
        prompts=len(pairs),
        prompt_tokens=sum(prompt_lengths),
        tokens=sum(len(s.decoded.tokens) for s in speculative),
        plain_rate=rates[0],
        speculative_rate=rates[1],
        ratio=_over(rates[1], rates[0]),
        ratio_median=statistics.median(ratios) if ratios else float("nan"),
        ratio_whole=_over(whole[1], whole[0]),
        tau=pooled_tau([len(s.decoded.tokens) for s in speculative], calls),
        plain_ms=steps[0],
        speculative_ms=steps[1],
        break_even_tau=_over(steps[1], steps[0]),
        identical=len(pairs) - len(different),
        first_difference="prompt {}, token {}".format(*different[0]) if different else "",
        all_ratios=tuple(round(ratio, 3) for ratio in ratios),
    )


def _over(a: float, b: float) -> float:
    return a / b if b else float("nan")


def cells(row: Row) -> dict[str, str]:
    """Return a row's cells under their headings."""
    return {
        "prompts": row.name,
        "number": str(row.prompts),
        "tokens": str(row.tokens),
        "plain/s": f"{row.plain_rate:.1f}",
        "spec/s": f"{row.speculative_rate:.1f}",
        "ratio": f"{row.ratio:.2f}",
        "median": f"{row.ratio_median:.2f}",
        "whole": f"{row.ratio_whole:.2f}",
        "tau": f"{row.tau:.2f}",
        "ms plain": f"{row.plain_ms:.3f}",
        "ms spec": f"{row.speculative_ms:.3f}",
        "pays at": f"{row.break_even_tau:.2f}",
        "same": f"{row.identical}/{row.prompts}",
    }


def table_line(values: Sequence[str]) -> str:
    """Return one line of the table: the name to the left, all else to the right."""
    return f"{values[0][:24]:24} {' '.join(f'{value:>8}' for value in values[1:])}"


def faults(rows: Sequence[Row], dtype: torch.dtype, compiles: int) -> list[str]:
    """Return a line for everything that makes the result wrong."""
    found = []
    if compiles:
        found.append(f"{compiles} compiles after the warm-up: the times are not of decoding alone")
    if dtype == torch.float32:
        found += [
            f"{row.name}: {row.prompts - row.identical} texts differ in float32, first at {row.first_difference}"
            for row in rows
            if row.identical < row.prompts
        ]
    return found


@dataclass(frozen=True)
class Job:
    """What is decoded with what."""

    folder: TargetFolder
    drafter: DrafterConfig | Path
    """A configuration of a random drafter, or an exported one's folder."""
    sets: dict[str, list[list[int]]]


def job_of(options: argparse.Namespace, caches: CacheDirs) -> Job:
    """Return what the command line asks for. Raises DFlashError, ConfigError or DataError naming what is wrong."""
    sets: dict[str, list[list[int]]] = {}
    drafter: DrafterConfig | Path
    if options.random_drafter:
        if options.run or not options.target:
            raise ConfigError("needs --target, and no run", where="--random-drafter", fix="Name one of the two.")
        if not options.source:
            raise ConfigError("is missing", where="--source", fix="Name prompts for the random drafter.")
        folder = resolve_target(TargetConfig(source=options.target), caches.models, caches.packages)
        drafter, system_prompt = _random_config(folder, options.num_layers, options.block_size), None
    else:
        if not options.run or options.target:
            raise ConfigError("is missing", where="RUN", fix="Name a run's folder, or --random-drafter and --target.")
        run = find_run(options.run, caches.runs)
        if not run.drafter_dir.is_dir():
            raise ConfigError("the run has no drafter yet", where=options.run, fix="Finish its training first.")
        drafter, system_prompt = run.drafter_dir, run.config.data.system_prompt
        folder = resolve_target(run.config.target, caches.models, caches.packages)
        sets |= _prompts_of(run, caches, options.prompts)
    tokenizer = load_tokenizer(folder)
    for source in options.source:
        prompts = load_prompts(source, caches.packages)
        rendered = (render_prompt(tokenizer, prompt.messages, system_prompt) for prompt in prompts)
        fitting = [ids for ids in rendered if len(ids) <= options.max_prompt_tokens]
        if not fitting:
            what = f"no prompt has at most {options.max_prompt_tokens} tokens"
            raise DataError(what, where=source, fix="Raise --max-prompt-tokens.")
        if (name := Path(source).stem) in sets:
            raise ConfigError(f"there is a set named {name!r} already", where=source, fix="Rename the file.")
        sets[name] = fitting[: options.prompts]
    return Job(folder, drafter, sets)


def _prompts_of(run: Run, caches: CacheDirs, count: int) -> dict[str, list[list[int]]]:
    """Return the first prompts of the run's two sets that were not trained on, from the answers alone: features of
    gigabytes need not be there."""
    manifest = read_manifest(run.manifest_path("cache"))
    folder = caches.data / Path(manifest["answers"]["folder"]).name if manifest else caches.data
    if not all((folder / f"{name}.jsonl").is_file() for name in RUN_SETS):
        raise DataError("has no answers here", where=run.id, fix="Rebuild them: invoke train --from-stage cache.")
    samples = {name: read_samples(folder / f"{name}.jsonl")[:count] for name in RUN_SETS}
    return {name: [s.input_ids[: prompt_len(s)] for s in of_set] for name, of_set in samples.items()}


def _random_config(folder: TargetFolder, num_layers: int, block_size: int) -> DrafterConfig:
    target = target_config(folder)
    depth = target.num_hidden_layers
    return DrafterConfig.for_target(
        target,
        num_hidden_layers=num_layers,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=spread_layer_ids(depth, max(1, min(5, depth - 3))),
    )


def run_job(job: Job, options: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> list[Row]:
    """Return the rows, printed as they come; notes warm-up and baseline in `report`."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    target = load_target(job.folder, dtype, device)
    stops: tuple[int, ...] = ()
    if isinstance(job.drafter, DrafterConfig):
        drafter = DFlashDraftModel(job.drafter)
        drafter.initialise(0, target.get_output_embeddings().weight.cpu())
        drafter = drafter.to(device, dtype).eval()
    else:
        drafter = load_drafter(job.drafter, dtype=dtype, device=device)
        stops = stop_ids(target, load_tokenizer(job.folder))
    longest = max(len(prompt) for prompts in job.sets.values() for prompt in prompts) + options.max_new_tokens
    settings: Mapping[str, Any] = {"stops": stops, "num_tokens": longest, "compiled": options.compile}
    begin = time.perf_counter()
    plain = StaticSpeculator(target, None, **settings)
    speculative = StaticSpeculator(target, drafter, drafted=options.drafted, **settings)
    first = next(iter(job.sets.values()))[0]
    for decoder in (plain, speculative):
        decoder.warm_up()
        decode_timed(decoder, first, options.max_new_tokens)
    report |= {"warm_up_seconds": round(time.perf_counter() - begin, 2), "drafted": speculative.num_drafted}
    print(f"warm-up {report['warm_up_seconds']} s, {speculative.num_drafted} tokens drafted a step", flush=True)
    before, rows = disk_counts(), list[Row]()
    for name, prompts in job.sets.items():
        row = compare(name, plain, speculative, prompts, options.max_new_tokens)
        lines = [table_line(list(cells(row)))] if not rows else []
        print(*lines, table_line(list(cells(row).values())), sep="\n", flush=True)
        rows.append(row)
    report["compiles_after_warmup"] = sum(disk_counts(before).values())
    report["static_decoder_ms"] = _static_decoder_ms(target, first, options.max_new_tokens)
    print(f"the cache stage's decoder with one row: {report['static_decoder_ms']:.3f} ms a token, prompt included")
    return rows


def _static_decoder_ms(target: Any, prompt: Sequence[int], max_new_tokens: int) -> float:
    """Return milliseconds a token of pipeline.static_decode's decoder with one row: a second plain way to compare."""
    decoder = StaticDecoder(target, (), 1, len(prompt) + max_new_tokens)
    decoder.answers([prompt], max_new_tokens)
    begin = time.perf_counter()
    decoder.answers([prompt], max_new_tokens)
    return 1e3 * (time.perf_counter() - begin) / max_new_tokens


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def parser_of() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", default="", help="a run's folder or id, or runs/latest")
    parser.add_argument("--random-drafter", action="store_true", help="no run: what a step costs")
    parser.add_argument("--target", default="", help="with --random-drafter: a folder or a named target")
    parser.add_argument("--num-layers", type=_positive, default=5, help="of the random drafter, default 5")
    parser.add_argument("--block-size", type=_positive, default=16, help="of the random drafter, default 16")
    parser.add_argument(
        "--source", action="append", default=[], help="more prompts: a name or a .jsonl; may be repeated"
    )
    parser.add_argument("--prompts", type=_positive, default=40, help="of each set, default 40")
    parser.add_argument(
        "--max-prompt-tokens", type=_positive, default=512, help="of --source, longer ones are left out"
    )
    parser.add_argument("--max-new-tokens", type=_positive, default=128, help="default 128")
    parser.add_argument("--drafted", type=_positive, help="tokens drafted a step; default all that the drafter has")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="both ways alike; default on a GPU only"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of().parse_args(arguments)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    try:
        if options.device == "cuda" and not cuda:
            raise DFlashError("torch sees no GPU here", where="--device", fix="Leave the option out.")
        check_record(options.json)
        if options.compile is None:
            options.compile = cuda
        job = job_of(options, CacheDirs.from_environment(ROOT))
        device = torch.device("cuda:0" if cuda else "cpu")
        words = sys.argv[1:] if arguments is None else arguments
        report: dict[str, Any] = {
            **header(f"python -m benchmarks.decode {shlex.join(words)}", device),
            "target": job.folder.name,
            "dtype": options.dtype,
            "compiled": options.compile,
        }
        print(f"{report['device']}, torch {report['torch']}, {options.dtype}, compiled: {options.compile}", flush=True)
        rows = run_job(job, options, device, report)
    except (DFlashError, PipelineError, EnvError) as error:
        print(error, file=sys.stderr)
        return 2
    found = faults(rows, getattr(torch, options.dtype), report["compiles_after_warmup"])
    if options.json:
        report |= {"rows": [asdict(row) for row in rows], "faults": found}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    for fault in found:
        print(fault, file=sys.stderr)
    return 4 if found else 0


if __name__ == "__main__":
    sys.exit(main())
