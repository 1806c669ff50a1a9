"""Train the tokenizer and write its files: byte-level BPE in which each digit is a token of its own.

A word is split from the space before it, so that a name has the same tokens in a sentence, in a list and in JSON: what
must be copied looks the same everywhere. Any text round-trips, because single bytes are tokens too.
"""

import argparse
import json
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data import Mix, Renderer, make_chat

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = r"\p{N}|\p{Lu}?\p{Ll}+|\p{Lu}+|\p{L}|\n+|[^\p{L}\p{N}\n]+"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and the two files that Hugging Face loaders read beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = roles | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": text in SPECIAL,
            }
            for text in SPECIAL + MARKERS
        },
        "chat_template": Renderer.source(),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "special_tokens_map.json").write_text(json.dumps(roles, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write into")
    parser.add_argument("--vocab-size", type=int, default=1536, help="number of tokens")
    parser.add_argument("--chats", type=int, default=20000, help="number of chats to learn from")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, renderer = Random(arguments.seed), Renderer()
    texts = [renderer.chat(make_chat(rng, False, Mix())) for _ in range(arguments.chats)]
    for marker in SPECIAL + MARKERS:
        texts = [text.replace(marker, "\n") for text in texts]
    write_tokenizer(train_tokenizer(texts, arguments.vocab_size), arguments.out)


if __name__ == "__main__":
    main()
