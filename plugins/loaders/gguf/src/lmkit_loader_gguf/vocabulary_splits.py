"""How texts are split before merges, by the name in `tokenizer.ggml.pre`.

The names, and what each does, are those of llama.cpp (src/llama-vocab.cpp); the expressions are in Oniguruma's syntax,
those of the models' own tokenizers where llama.cpp writes them for an engine that knows less. So ids differ from those
of llama.cpp where letters end in marks (gpt-4o, tekken, kimi-k2), at U+3000 (deepseek-llm, deepseek-coder), at blanks
before digits (afmoe, tiny_aya), and in runs of newlines longer than any token (gemma4).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """Each expression cuts what those before it left; what matches and what lies between matches are pieces."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is not merged
    add_bos: bool = False  # where the file does not say
    byte_level: bool = True  # else texts are merged as they are, with U+2581 for each blank
    whole_lines: bool = False  # newlines that are a token are not merged


_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_CJK = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_CASED = (  # letters that have cases, in the Unicode of those who wrote this down
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}"
    r"\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}"
    r"\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}"
    r"\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}"
    r"\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}"
    r"\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}"
    r"\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}"
    r"\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}"
    r"\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}"
    r"\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_NO_STOPS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"


def _mixed_case(digits: str, suffix: str = "") -> str:
    """Words are cut where lower case turns to upper case. `suffix`: of words."""
    return rf"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}|{digits}|{_PATHS}|{_BLANKS}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_QWEN35 = rf"{_SUFFIX}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_DEEPSEEK3 = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_GPT4O = _mixed_case(r"\p{N}{1,3}", rf"{_SUFFIX}?")
_NOT_HAN = (rf"[{_UPPER[1:-1]}&&[^\p{{Han}}]]", rf"[{_LOWER[1:-1]}&&[^\p{{Han}}]]")
_KIMI = (
    rf"\p{{Han}}+|{_LEAD}{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_SUFFIX}?|{_LEAD}{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
)
_ASIAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{309f}\x{30a0}-\x{30ff}\x{ff65}-\x{ff9f}"
    r"\x{2f00}-\x{2fdf}\x{0e40}-\x{0e7f}\x{0e80}-\x{0eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}"
    r"\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
_LINES = r"[^\n]+|[\n]+"

SPLITS: dict[str, Split] = {
    name: split
    for names, split in (
        ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais trillion "
         "granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe", Split((_GPT2,))),
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
         Split((_LLAMA3,), ignore_merges=True, add_bos=True)),
        ("dbrx smaug-bpe glm4 chatglm-bpe", Split((_LLAMA3,))),
        ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", Split((_QWEN2,))),
        ("qwen35", Split((_QWEN35,))),
        ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Split((r"\p{N}", _GPT2))),
        ("falcon", Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
        ("default", Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
        ("deepseek-llm", Split((
            r"[\r\n]", rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
            r"\s+$", _CJK, r"\p{N}+",
        ))),
        ("deepseek-coder", Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Split((r"\p{N}{1,3}", _HAN, _DEEPSEEK3))),
        ("spark2_5", Split((
            r"\p{N}{1,3}", _HAN,
            rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]"
            r"|\s+(?!\S)|\s+", r"\p{N}",
        ))),
        ("youtu", Split((
            r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}"
            rf"\x{{ff1b}}\x{{ff0c}}\x{{3001}}-\x{{303f}}\x{{fe30}}-\x{{fe4f}}]+|[\x{{3105}}-\x{{312f}}]+|{_HAN}",
            _mixed_case(r"\p{N}", rf"{_SUFFIX}?"),
        ), ignore_merges=True)),
        ("jais-2", Split((
            rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s{1}",
        ))),
        ("minicpm5", Split((
            r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}",
        ), ignore_merges=True)),
        ("poro-chat bloom gpt3-finnish", Split((_NO_STOPS,))),
        ("viking", Split((_NO_STOPS, r"\p{N}"))),
        ("tekken", Split((_mixed_case(r"\p{N}"),), ignore_merges=True, add_bos=True)),
        ("chameleon", Split((
            r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
        ), add_bos=True)),
        ("gpt-4o llama4 kanana2 talkie minimax-m2", Split((_GPT4O,))),
        ("granite-embed-multi-97m", Split((_GPT4O,), ignore_merges=True)),
        ("tiny_aya cohere2moe", Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
        ("kimi-k2", Split((_KIMI,))),
        ("superbpe", Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
        ("bailingmoe bailingmoe2 llada-moe", Split((
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
        ))),
        ("seed-coder", Split((rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",))),
        ("ufakzeka", Split((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",))),
        ("afmoe", Split((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3))),
        ("laguna", Split((_LINES, _QWEN2))),
        ("exaone-moe", Split((
            rf"{_SUFFIX}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        ))),
        ("gemma4 granite-embed-multi-311m", Split((_LINES,), add_bos=True, byte_level=False, whole_lines=True)),
        ("sarvam-moe", Split((_LINES,), byte_level=False)),
    )
    for name in names.split()
}  # fmt: skip
