"""A tiny target on disk, made on the spot: a random model and a byte-level tokenizer with a ChatML template.

For the smoke test and for the tests: whatever is proved on it needs no download, and says nothing of tau.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|unused|>"]
PAD_ID, START_ID, EOS_ID, MASK_ID, UNUSED_ID = range(5)

VOCAB_SIZE = 320
"""Rows of the embedding; the tokenizer knows fewer ids, as real ones do."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 261 ids: the specials 0 to 4, then one token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(BPE({token: i for i, token in enumerate([*SPECIAL, *letters])}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>", "<|unused|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_model(arch: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
    """Return a float32 model with random weights: 4 layers, width 64, 4 heads of 16, 2 key-value heads.

    arch   transformers' name of the architecture: qwen3, llama, qwen2
    initializer_range is 0.3: at the default 0.02 greedy decoding only repeats the last token, so that tests of
    decoding would pass without saying anything.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if arch != "qwen2":  # its head width is always hidden_size / heads
        settings["head_dim"] = 16
    config = AutoConfig.for_model(arch, **{**settings, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model.eval()


def tiny_target(folder: Path, arch: str = "qwen3", **changes: Any) -> Path:
    """Return `folder`/target-<arch>, a Hugging Face folder with a tiny model and its tokenizer."""
    out = folder / f"target-{arch}"
    tiny_model(arch, **changes).save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    return out
