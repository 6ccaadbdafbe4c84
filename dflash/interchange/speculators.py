"""speculators' drafters: nested transformer_layer_config, layers counted from 1, an embedding and a head of their own.

Layer numbers: its id `i` is hidden_states[i] in transformers, the output of decoder layer i - 1, so ours + 1.
Sliding layers: causal inside the block unless sliding_window_non_causal; the window hangs on the anchor (anatomy 1.6).
Its head may cover a part of the vocabulary: d2t (draft id -> offset to the target's id) and t2d (bool, which target
ids it has). Training here uses the target's head, so these are kept aside and given back on export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.checkpoint import CONFIG, WEIGHTS
from dflash.config import FULL, SLIDING, DrafterConfig
from dflash.config_json import DFLASH, from_json, to_json
from dflash.errors import DFlashError
from dflash.interchange.drafter import ForeignDrafter, Kept, body_tensors, checked
from dflash.interchange.files import NOTE, publish, save_tensors, write_object
from dflash.interchange.heads import refuse_head_tensors
from dflash.interchange.readings import find_reading
from dflash.interchange.shapes import complete
from dflash.interchange.target import TargetTables, differing_rows
from dflash.interchange.zlab import canonical
from dflash.strict import refuse_architecture

KIND = "speculators_model_type"
_OWN = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")
_NOT_OF_THE_LAYERS = ("architectures", "block_size", "dflash_config", "is_causal", "dtype")
_BAD_FIX = "Mend config.json."
_NO = "speculators' format cannot say it; use --to zlab."


def read_speculators(
    data: dict[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    reading: str = "",
    target: Mapping[str, Any] | None = None,
    tables: TargetTables | None = None,
    where: str = "",
) -> ForeignDrafter:
    """Return the drafter of a speculators config and its tensors.

    target   config.json of the target; needed for its depth, which speculators does not write
    tables   the target's, to see whether the file's own embedding is the same
    Raises DFlashError for another kind of speculator and for what a plain drafter has not.
    """
    bare = body_tensors(tensors)
    own = {name: tensor for name, tensor in bare.items() if name in _OWN}
    body = {name: tensor for name, tensor in bare.items() if name not in _OWN}
    refuse_head_tensors(body, where)
    flat, notes = canonical(_zlab_layout(data, reading), None)
    notes += complete(flat, body, target)
    if flat.get("num_target_layers") is None:
        raise DFlashError(
            "is missing: this format does not say how deep the target is",
            where="num_target_layers",
            fix="Give --target.",
        )
    config = checked(from_json(flat), body, where)
    notes += _check_own(own, data, config, tables, where)
    verifier = (data.get("speculators_config") or {}).get("verifier") or {}
    return ForeignDrafter(
        format="speculators",
        config=config,
        tensors=body,
        notes=tuple(notes),
        kept=Kept(dict(data), own),
        target=str(verifier.get("name_or_path") or ""),
    )


def _zlab_layout(data: Mapping[str, Any], reading: str) -> dict[str, Any]:
    """Return the config in z-lab's layout, with causality and window as speculators computes them."""
    if data.get(KIND) != "dflash":
        raise DFlashError(f"{data.get(KIND)!r} is another kind of speculator", where=KIND, fix="Only 'dflash' is read.")
    for name in data.get("architectures") or []:
        refuse_architecture(str(name))
    for key, only in (("projector_type", "dflash"), ("shift_label", False), ("sample_from_anchor", False)):
        if data.get(key) not in (None, only):
            raise DFlashError(f"{data[key]!r} is not supported", where=key, fix=f"Only {only!r} is plain DFlash.")
    layers = data.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise DFlashError("is missing", where="transformer_layer_config", fix=_BAD_FIX)
    if layers.get("model_type", "qwen3") != "qwen3":
        raise DFlashError(
            f"{layers['model_type']!r} is not supported",
            where="transformer_layer_config.model_type",
            fix="Only 'qwen3'.",
        )
    ids = data.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 1 for i in ids):
        raise DFlashError(
            f"{ids!r} does not name layers counted from 1", where="aux_hidden_state_layer_ids", fix=_BAD_FIX
        )
    for key in ("mask_token_id", "block_size"):
        if data.get(key) is None:
            raise DFlashError("is missing", where=key, fix=_BAD_FIX)
    hidden = data.get("target_hidden_size")
    if hidden not in (None, layers.get("hidden_size")):
        raise DFlashError(
            f"is {hidden}, the drafter's is {layers.get('hidden_size')}",
            where="target_hidden_size",
            fix="Drafters of another width than the target's are not supported.",
        )
    flat: dict[str, Any] = {key: value for key, value in layers.items() if key not in _NOT_OF_THE_LAYERS}
    inner = {"mask_token_id": data["mask_token_id"], "target_layer_ids": [i - 1 for i in ids]}
    kinds = layers.get("layer_types") or ()
    both_ways = bool(data.get("sliding_window_non_causal", False))
    window = flat.pop("window_reading", None) or find_reading(reading or "speculators").window
    if SLIDING in kinds:
        inner["window_reading"] = window
        if both_ways:
            flat["is_causal"] = False
    said = layers.get("is_causal")
    if said is not None and any((kind == SLIDING and not both_ways) != said for kind in kinds or (FULL,)):
        raise DFlashError(
            f"is {said}, which is not what sliding_window_non_causal says",
            where="transformer_layer_config.is_causal",
            fix="Keep the true one.",
        )
    dtype = data.get("dtype") or data.get("torch_dtype")
    return flat | {
        "architectures": [DFLASH],
        "block_size": data["block_size"],
        "dflash_config": inner,
        **({"dtype": dtype} if dtype else {}),
    }


def _check_own(
    own: Mapping[str, Tensor],
    data: Mapping[str, Any],
    config: DrafterConfig,
    tables: TargetTables | None,
    where: str,
) -> list[str]:
    """Return what to know about the file's own embedding and head. Raises DFlashError for a misshapen one."""
    width, vocab = config.hidden_size, config.vocab_size
    drafted = data.get("draft_vocab_size") or vocab
    shapes = {
        "embed_tokens.weight": (vocab, width),
        "lm_head.weight": (drafted, width),
        "d2t": (drafted,),
        "t2d": (vocab,),
    }
    for name, shape in shapes.items():
        if name in own and tuple(own[name].shape) != shape:
            raise DFlashError(
                f"{name} has shape {list(own[name].shape)}, the config wants {list(shape)}", where=where, fix=_BAD_FIX
            )
    if drafted != vocab and not {"lm_head.weight", "d2t"} <= own.keys():
        raise DFlashError(
            f"draft_vocab_size is {drafted} of {vocab}, and lm_head.weight or d2t is not in the file",
            where=where,
            fix="Copy it again.",
        )
    notes = []
    if drafted != vocab:
        notes.append(
            f"ITS OWN HEAD OF {drafted} OF {vocab} WORDS IS NOT USED HERE: training and decoding take the target's. "
            "It is kept aside, and export --to speculators writes it back"
        )
    if tables is not None and "embed_tokens.weight" in own:
        count = differing_rows(own["embed_tokens.weight"], tables.embedding)
        if count:
            notes.append(f"ITS EMBEDDING DIFFERS FROM THE TARGET'S IN {count} ROWS, and the target's is used here")
    return notes


def speculators_config(config: DrafterConfig, *, target: str, architectures: tuple[str, ...]) -> dict[str, Any]:
    """Return config.json's content for speculators and for vLLM's reader of its format.

    Raises DFlashError for a drafter that this format cannot describe.
    """
    kinds = config.layer_types
    if config.is_causal and FULL in kinds:
        raise DFlashError("is true for full layers, which it always runs both ways", where="is_causal", fix=_NO)
    for key, plain in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", None)):
        if getattr(config, key) != plain:
            raise DFlashError(f"is {getattr(config, key)}, for which it has no key", where=key, fix=_NO)
    last = config.num_target_layers - 1
    if last in config.target_layer_ids:
        raise DFlashError(f"names the last layer, {last}, which it cannot tap", where="target_layer_ids", fix=_NO)
    layers = {key: value for key, value in to_json(config).items() if key not in _NOT_OF_THE_LAYERS}
    if SLIDING in kinds:
        layers["window_reading"] = config.window_reading
    return {
        "architectures": ["DFlashSpeculator"],
        KIND: "dflash",
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "sliding_window_non_causal": SLIDING in kinds and config.is_causal is False,
        "sample_from_anchor": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": layers,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
        "tie_word_embeddings": False,
    }


def write_speculators(out: Path, drafter: ForeignDrafter, tables: TargetTables | None, note: Mapping[str, Any]) -> None:
    """Publish a folder in speculators' format.

    A drafter that was imported from this format gets its own config and tables back, as they were. Any other gets the
    target's `tables`, whole vocabulary. Raises DFlashError if it has neither.
    """
    kept = drafter.kept
    if drafter.config.selector_rank or drafter.config.markov_rank:
        kind = "DFlash 2" if drafter.config.selector_rank else "a Markov bias"
        raise DFlashError(f"holds no drafter with {kind}", where="--to speculators", fix="Use --to zlab.")
    data: dict[str, Any]
    if kept is not None:
        _check_kept(kept, drafter.config)
        data, own = kept.config, kept.tensors
    elif tables is not None:
        _check_tables(drafter.config, tables)
        data = speculators_config(drafter.config, target=tables.name, architectures=tables.architectures)
        own = {"embed_tokens.weight": tables.embedding, "lm_head.weight": tables.head}
    else:
        raise DFlashError(
            "needs the target's embedding and head, which its files carry",
            where="--to speculators",
            fix="Give --target.",
        )

    def fill(folder: Path) -> None:
        write_object(folder / CONFIG, data)
        save_tensors({**drafter.tensors, **own}, folder / WEIGHTS)
        write_object(folder / NOTE, note)

    publish(out, fill)


def _check_kept(kept: Kept, config: DrafterConfig) -> None:
    """Raise DFlashError if the folder's config.json was changed since the import, for the kept one would not say so."""
    flat = _zlab_layout(kept.config, "")
    said = flat | flat["dflash_config"]
    for key, value in asdict(config).items():
        if key in ("dtype", "window_reading") or said.get(key) is None:
            continue
        mine = list(value) if isinstance(value, tuple) else value
        if mine != said[key]:
            raise DFlashError(
                f"is {mine!r}, and was {said[key]!r} in the imported file", where=key, fix="Import the drafter again."
            )


def _check_tables(config: DrafterConfig, tables: TargetTables) -> None:
    """Raise DFlashError if the target's tables are not of the drafter's width and vocabulary."""
    wanted = (config.vocab_size, config.hidden_size)
    for name, table in (("embedding", tables.embedding), ("head", tables.head)):
        if tuple(table.shape) != wanted:
            raise DFlashError(
                f"has {name} {list(table.shape)}, the drafter wants {list(wanted)}",
                where=tables.name,
                fix="Name the drafter's own target.",
            )
