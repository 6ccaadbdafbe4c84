"""Stage 1: target, prompts, the target's answers, its features, and the compile cache; each kept under a key."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.config import DrafterConfig
from dflash.taps import extract_features
from env.caches import CacheDirs
from pipeline.config import RunConfig
from pipeline.data import (
    FeatureShards,
    ShardWriter,
    building,
    check_files,
    data_key,
    prompt_len,
    published,
    read_data_manifest,
    read_samples,
    write_data_manifest,
    write_samples,
)
from pipeline.drafter import drafter_config
from pipeline.errors import ConfigError, DataError
from pipeline.inputs import input_files
from pipeline.metrics import progress_bar
from pipeline.own_prompts import OwnPrompts
from pipeline.prompts import collect_prompts
from pipeline.regenerate import generate_answers
from pipeline.rendering import Sample, check_mask_absent, check_supervised, make_sample, render_prompt, supervised_share
from pipeline.runs import Run, read_manifest
from pipeline.targets import TargetFolder, check_mask_token, load_target, load_tokenizer, resolve_target, target_config
from pipeline.warmup import compile_once, set_threads

ROOT = Path(__file__).resolve().parent.parent
SETS = ("train", "held_out", "out_of_domain")
ANSWERED = ("train", "held_out")
"""Sets whose prompts the target answers here: held-out answers give tau during training, and are never trained on."""
FORMAT = 3
"""Part of every data key: raise it when regenerate.py, taps.py or data.py write something else than before."""


def build_cache(run: Run) -> dict[str, Any]:
    """Return the manifest: where answers, features and compiled code are, under which key, and what they hold."""
    config, caches = run.config, CacheDirs.from_environment(ROOT)
    check_devices(config)
    folder = resolve_target(config.target, caches.models, caches.packages)
    target_config(folder)  # the tokenizer's loader reads it too, and would call its faults the tokenizer's
    tokenizer = load_tokenizer(folder)
    check_mask_token(config.drafter.mask_token_id, folder, tokenizer)
    drafter = drafter_config(config, folder)
    device = config.topology.targets[0]
    set_threads(1, torch.device(device))
    model = _Lazy(lambda: load_target(folder, getattr(torch, config.target.dtype), device))
    own = OwnPrompts(config=config, tokenizer=tokenizer, target=model, identity=folder.identity, cache=caches.data)
    prompts = collect_prompts(config, caches.packages, tokenizer, write=own)

    rendered = {
        name: [(p.id, render_prompt(tokenizer, p.messages, config.data.system_prompt)) for p in getattr(prompts, name)]
        for name in SETS
    }
    answer_factors = {
        "format": FORMAT,
        "target": folder.identity,
        "dtype": config.target.dtype,
        "prompts": {name: [list(item) for item in items] for name, items in rendered.items()},
        "max_answer_tokens": config.data.max_answer_tokens,
        "generate_batch": config.data.generate_batch,
    }
    answers_at = caches.data / f"answers-{data_key(answer_factors)}"
    with building(answers_at):
        answers = read_data_manifest(answers_at)
        if answers is None:
            answers = _write_answers(config, model(), tokenizer, rendered, answers_at, prompts.skipped_too_long)
    samples = check_supervised(read_samples(answers_at / "train.jsonl"))
    held_out, outside = (read_samples(answers_at / f"{name}.jsonl") for name in SETS[1:])
    check_mask_absent([*samples, *held_out, *outside], drafter.mask_token_id)

    features_at: Path | None = None
    if config.data.features == "cached":
        feature_factors = {
            "format": FORMAT,
            "answers": answers_at.name,
            "taps": list(drafter.target_layer_ids),
            "final_state": bool(config.train.soft_weight),
            "shard": config.data.shard_samples,
        }
        features_at = caches.data / f"features-{data_key(feature_factors)}"
        with building(features_at):
            if read_data_manifest(features_at) is None:
                _write_features(config, model(), [*samples, *held_out], drafter, features_at)
    del model, own
    counts = ("num_samples", "num_tokens", "supervised_share", "skipped_too_long", "answers_cut")
    return {
        "inputs": input_files(config),
        "target": {"name": folder.name, "identity": folder.identity},
        "own_prompts": prompts.own,
        "answers": {"folder": str(answers_at), **{key: answers[key] for key in counts}},
        "features": {
            "mode": config.data.features,
            "folder": str(features_at) if features_at else None,
            "layer_ids": list(drafter.target_layer_ids),
        },
        "compile": {"folder": os.environ.get("TORCHINDUCTOR_CACHE_DIR"), **compile_once(config, folder, drafter)},
    }


class _Lazy:
    """Loads the target when it is first needed: what is cached needs none."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._model = load, None

    def __call__(self) -> Any:
        if self._model is None:
            self._model = self._load()
        return self._model


def check_devices(config: RunConfig, fields: Sequence[str] = ("targets", "drafters")) -> None:
    """Raise ConfigError for a GPU of topology's `fields` that is not there, before anything is computed."""
    count = torch.cuda.device_count()
    for field in fields:
        for name in getattr(config.topology, field):
            if name.startswith("cuda") and int(name.partition(":")[2]) >= count:
                has = "no GPU that torch can use" if not count else f"{count} GPU{'s' if count > 1 else ''}"
                raise ConfigError(
                    f"{name} does not exist, this machine has {has}",
                    where=f"topology.{field}",
                    fix="Name one that does, or cpu.",
                )


def _write_answers(
    config: RunConfig,
    target: Any,
    tokenizer: Any,
    rendered: dict[str, list[tuple[str, list[int]]]],
    folder: Path,
    skipped: int,
) -> dict[str, Any]:
    with progress_bar("target answers", sum(len(rendered[name]) for name in ANSWERED)) as bar:

        def answered(name: str) -> list[Sample]:
            # A call for each set: what is held out must not change the batches, and so the near-ties, of training.
            done = 0

            def advance(count: int, tokens: int) -> None:
                nonlocal done
                bar.advance(count - done)
                done = count

            answers = generate_answers(
                target,
                tokenizer,
                [prompt for _, prompt in rendered[name]],
                max_new_tokens=config.data.max_answer_tokens,
                batch_size=config.data.generate_batch,
                progress=advance,
            )
            return [make_sample(i, prompt, answer) for (i, prompt), answer in zip(rendered[name], answers, strict=True)]

        found = {name: answered(name) for name in ANSWERED}
    samples = found["train"]
    with published(folder) as temporary:
        for name in SETS:
            texts = found.get(name) or [make_sample(i, prompt, []) for i, prompt in rendered[name]]
            write_samples(temporary / f"{name}.jsonl", texts)
        return write_data_manifest(
            temporary,
            {
                "num_samples": len(samples),
                "num_tokens": sum(len(s.input_ids) for s in samples),
                "supervised_share": round(supervised_share(samples), 4),
                "skipped_too_long": skipped,
                "answers_cut": sum(sum(s.loss_mask) == config.data.max_answer_tokens for s in samples),
            },
        )


def _write_features(
    config: RunConfig, target: Any, samples: list[Sample], drafter: DrafterConfig, folder: Path
) -> None:
    with published(folder) as temporary, progress_bar("target features", len(samples)) as bar:
        writer = ShardWriter(temporary, config.data.shard_samples)
        for sample in samples:
            ids = torch.tensor([sample.input_ids], device=target.device)
            soft = bool(config.train.soft_weight)
            writer.add(extract_features(target, ids, drafter.target_layer_ids, final_state=soft)[0])
            bar.advance()
        writer.flush()
        write_data_manifest(temporary, {"places": writer.places, "samples": [s.id for s in samples]})


@dataclass(frozen=True)
class CachedData:
    """What the later stages read of stage 1.

    features   of the samples and, after them, of the held-out texts, by index; None when they are made online
    prompts    held_out and out_of_domain without answers, for decoding
    held_out   the held-out prompts with the target's greedy answers
    """

    target: TargetFolder
    drafter: DrafterConfig
    samples: list[Sample]
    features: FeatureShards | None
    answers_key: str
    prompts: dict[str, list[Sample]]
    held_out: Sequence[Sample] = ()

    def required_features(self) -> FeatureShards:
        """Return the features of a run that has them cached. Raises DataError if they are not there."""
        if self.features is None:
            raise DataError(
                "are missing", where="cached features", fix="Rebuild them: invoke train --from-stage cache."
            )
        return self.features


def load_cached(run: Run) -> CachedData:
    """Return the data that the cache stage's manifest names, its checksums verified.

    Raises DataError when something of it was changed or removed since.
    """
    manifest = read_manifest(run.manifest_path("cache"))
    again = "Rebuild it: invoke train --from-stage cache."
    if manifest is None:
        raise DataError("has no cache stage", where=run.id, fix=again)
    if not all(isinstance(manifest.get(key), dict) for key in ("target", "answers", "features")):
        raise DataError("is damaged", where=str(run.manifest_path("cache")), fix=again)
    caches = CacheDirs.from_environment(ROOT)
    folder = resolve_target(run.config.target, caches.models, caches.packages)
    if folder.identity != manifest["target"]["identity"]:
        raise DataError("the target's files changed since the cache stage", where=str(folder.path), fix=again)
    drafter = drafter_config(run.config, folder)
    # By name below today's cache: in the image it is mounted elsewhere than on the host, and it may have been moved.
    answers_at, *others = (
        caches.data / Path(manifest[kind]["folder"]).name
        for kind in ("answers", "features")
        if manifest[kind]["folder"]
    )
    places = [answers_at, *others]
    found = {}
    for place in places:
        content = read_data_manifest(place)
        if content is None:
            raise DataError("is gone or incomplete", where=str(place), fix=again)
        check_files(place, content)
        found[place] = content
    features = FeatureShards(places[1], found[places[1]]) if len(places) > 1 else None
    texts = {name: read_samples(answers_at / f"{name}.jsonl") for name in SETS[1:]}
    return CachedData(
        target=folder,
        drafter=drafter,
        samples=check_supervised(read_samples(answers_at / "train.jsonl")),
        features=features,
        answers_key=answers_at.name,
        prompts={name: [make_sample(s.id, s.input_ids[: prompt_len(s)], []) for s in texts[name]] for name in texts},
        held_out=texts["held_out"],
    )
