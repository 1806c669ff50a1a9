import json
from base64 import b64encode

from lmkit_testing import TemplateConformance, TokenizerConformance

PIECES = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"\xc3\xa9", b"12"]
TURNS = """
answer = "<|assistant|>\\n"
[turn]
user = ["<|user|>\\n", "<|end|>"]
assistant = ["<|assistant|>\\n", "<|end|>"]
"""


class TestRanks(TokenizerConformance):
    plugin = "tokenizer:ranks"

    def files(self, folder):
        added = {"<|end|>": 261, "<|user|>": 262, "<think>": 263}
        pieces = [b64encode(piece).decode() for piece in PIECES]
        found = {"pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]+", "pieces": pieces, "added": added, "special": [261, 262]}
        (folder / "ranks.json").write_text(json.dumps(found))
        return folder

    def test_the_lowest_rank_is_joined_first(self, tokenizer):
        assert tokenizer.encode("the") == [257]
        assert tokenizer.encode("thth") == [256, 256]
        assert tokenizer.encode("12") == [49, 50], "the pattern parts them"
        assert tokenizer.encode("<|user|>the<think>") == [262, 257, 263]


class TestTurns(TemplateConformance):
    plugin = "template:turns"

    def file(self, folder):
        path = folder / "chat.turns"
        path.write_text(TURNS)
        return path, (
            '{% for m in messages %}{% if m.role == "user" %}{{ "<|user|>\\n" }}{{ m.content }}{{ "<|end|>" }}'
            '{% elif m.role == "assistant" %}{{ "<|assistant|>\\n" }}{{ m.content }}{{ "<|end|>" }}'
            "{% else %}{{ raise_exception('no turn for ' + m.role) }}{% endif %}{% endfor %}"
            '{% if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% endif %}'
        )
