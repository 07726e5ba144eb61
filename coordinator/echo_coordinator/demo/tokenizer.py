"""The demo's tokenizer: one token a character, with a beginning and an end token; a real fast tokenizer."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from echo_coordinator.demo.answers import ALPHABET

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (PAD, BOS, EOS)
PAD_ID, BOS_ID, EOS_ID = range(3)
VOCABULARY = {token: number for number, token in enumerate((*SPECIALS, *ALPHABET))}


def build_tokenizer() -> Tokenizer:
    """Return the tokenizer. Plain text gets a beginning token; characters outside the alphabet are unknown to it."""
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token=PAD))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as AutoTokenizer reads them."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
