"""Whose characters a text is made of, through everything that a template can do with it."""

from __future__ import annotations

import random
import warnings

import pytest
from lmkit_tokenizer_json.origin import OURS, THEIRS, ClientText, concat, origins
from lmkit_tokenizer_json.tracked import TrackedEnvironment

PROGRAMS = 400
TEXT = "\u03ba\u03bb\u03bc \u03bd\u03be"  # letters that nothing but the client's text has
WAYS = """
    |upper |lower |trim |title |capitalize |indent |indent(2,first=true) |truncate(5) |replace('λ','<') |string |list
    |join |reverse |e |safe |forceescape |urlencode |striptags |tojson |first |last |max |min |sort |unique |select
    |batch(2) |map('upper') |map('join') |groupby(0) |format |d('x') |attr('x') |wordcount |length |items |dictsort
    [1:] [::-1] [0] .strip('κ') .lstrip() .rstrip() .split('λ') .split('λ')[0] .split() .rsplit('λ',1)[-1]
    .splitlines() .partition('λ') .rpartition('λ')[2] .replace('κ','') .upper() .lower() .title() .swapcase()
    .casefold() .capitalize() .zfill(9) .center(9) .ljust(9,'-') .rjust(9) .expandtabs() .join(['p','q']) .format()
    .removeprefix('κ') .removesuffix('ξ') .translate({955:'Q'}) .encode() .find('λ') *2 ~'z' +'z' ~{'a':'b'}
"""
FRAMES = """
    {{ (x)WAY }}
    {{ ('<' ~ x ~ '>')WAY }}
    {{ ([x, 'z'])WAY }}
    {{ ({x: [x]})WAY }}
    {{ ('z' + x)WAY }}
    {% set y %}<{{ x }}>{% endset %}{{ (y)WAY }}
    {% macro m(a) %}{{ (a)WAY }}>{% endmacro %}{{ m('<' ~ x) }}
    {% filter upper %}{{ (x)WAY }}{% endfilter %}
    {% for y in (x)WAY %}{{ y }}-{% endfor %}
    {{ '%s|%s' % (x, (x)WAY) }}
    {{ '%(a)s' % {'a': (x)WAY} }}
    {{ '{}|{a}'.format((x)WAY, a=x) }}
    {{ '-'.join([x, (x)WAY | string]) }}
    {{ '<%s>' | format((x)WAY) }}
    {{ 'q'.replace('q', (x)WAY) }}
    {{ 'q' | replace('q', x)WAY }}
    {% set n = namespace(a=(x)WAY) %}{{ n }}{{ n.a }}
    {{ ['<', (x)WAY] | join('+') }}
    {{ [{'a': (x)WAY}] | map(attribute='a') | join }}
    {{ dict(a=(x)WAY) }}
"""


def test_no_program_takes_a_text_from_its_owner() -> None:
    """Seeded random programs: every letter of the client is known as the client's, whatever it went through."""
    rng, env, ran = random.Random(1), TrackedEnvironment(), 0
    ways, frames = WAYS.split(), FRAMES.strip().splitlines()
    for _ in range(PROGRAMS):
        chain = "".join(rng.choice(ways) for _ in range(rng.randint(1, 3)))
        source = rng.choice(frames).strip().replace("WAY", chain)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                text = concat(env.from_string(source).generate({"x": ClientText(TEXT)}))
        except Exception:  # many programs are nonsense
            continue
        ran += 1
        lost = [c for c, whose in zip(text, origins(text), strict=True) if c.lower() in TEXT.strip() and not whose]
        assert not [c for c in lost if c != " "], source
    assert ran > PROGRAMS // 4


@pytest.mark.parametrize(
    ("made", "text", "whose"),
    [
        ("x + '>'", "ab>", "110"),
        ("'<' + x", "<ab", "011"),
        ("'<' ~ x ~ '>'", "<ab>", "0110"),
        ("('<' ~ x ~ '>')[1:-1]", "ab", "11"),
        ("(' <' ~ x ~ '> ') | trim", "<ab>", "0110"),
        ("(' <' ~ x).strip(' <')", "ab", "11"),
        ("('<' ~ x ~ '>').split('b')[1]", ">", "0"),
        ("('<' ~ x ~ '> c').split()[0]", "<ab>", "0110"),
        ("('<' ~ x) | upper", "<AB", "011"),
        ("x.replace('a', '<>')", "<>b", "001"),
        ("'%s:%s' % ('r', x)", "r:ab", "0011"),
        ("'{}:{}'.format('r', x)", "r:ab", "0011"),
        ("'{:>4}'.format(x)", "  ab", "1111"),
        ("'%s:%s' | format('r', x)", "r:ab", "0011"),
        ("[x, '|', x] | join('-')", "ab-|-ab", "1100011"),
        ("'-'.join([x, 'c'])", "ab-c", "1100"),
        ("x * 2", "abab", "1111"),
        ("{'k': x} | tojson", '{"k": "ab"}', "1" * 11),
        ("{'k': 'c'} | tojson", '{"k": "c"}', "0" * 10),
    ],
)
def test_what_can_be_followed(made: str, text: str, whose: str) -> None:
    found = concat(TrackedEnvironment().from_string("{{ " + made + " }}").generate({"x": ClientText("ab")}))
    assert found == text
    assert origins(found) == b"".join(THEIRS if w == "1" else OURS for w in whose)


def test_it_is_the_string_that_it_was() -> None:
    text = ClientText("ab")
    assert text == "ab"
    assert hash(text) == hash("ab")
    assert {text: 1}["ab"] == 1
    assert isinstance(str(text), ClientText)
    assert type(ClientText("<ab", OURS + THEIRS * 2)[:1]) is str


def test_it_tells_a_template_nothing_more() -> None:
    source = "{{ x._origins }}{{ x.__class__ }}|{{ x is string }}{{ x == 'ab' }}{{ 'a' in x }}{{ x | length }}"
    assert concat(TrackedEnvironment().from_string(source).generate({"x": ClientText("ab")})) == "|TrueTrueTrue2"
