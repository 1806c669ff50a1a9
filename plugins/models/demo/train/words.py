"""Random words, names and wordings, and the rule that keeps some of them out of training.

Every value that an answer must copy or compute from (a city, a pair of numbers, a list) and every fixed question is
held out when a hash of its text says so: training never sees it, evaluation sees nothing else.
"""

import re
import zlib
from collections.abc import Callable
from random import Random
from string import capwords
from typing import TypeVar

T = TypeVar("T")
HELD_OUT_ONE_IN = 10
SPLICED = 0.3  # share of the invented words that are made of two real ones


def listed(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


CITIES = listed(
    """
    Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki Copenhagen Athens
    Budapest Zurich Geneva Munich Hamburg Milan Venice Florence Naples Lyon Nice Barcelona Seville Porto Brussels
    Amsterdam Tokyo Kyoto Osaka Seoul Beijing Shanghai Singapore Bangkok Hanoi Manila Jakarta Delhi Mumbai Dubai Cairo
    Nairobi Lagos Boston Chicago Denver Seattle Dallas Austin Houston Miami Toronto Montreal Vancouver Lima Bogota
    Santiago Sydney Melbourne Perth Auckland Istanbul Moscow Kiev Riga Tallinn Vilnius
    """
)
LONG_CITIES = ["New York", "San Francisco", "Los Angeles", "Hong Kong", "Mexico City", "Cape Town", "Tel Aviv"]
REGIONS = listed("MA CA NY TX WA UK US France Germany Spain Italy Japan Brazil Canada India China Mexico Poland")
NAMES = listed(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Paul Rita Sam Tina Victor Wendy Adam
    Bella Carl Diana Erik Fiona George Hanna Ivan Julia Karl Laura Mark Nina Oscar Petra Robert Sara Tom Uma Vera Will
    Yara Zoe Alice Bob Carol Alex Chris Lucy Mia Liam Oliver Sophia Lena Jonas Peter John Mary James Linda
    """
)
NOUNS = listed(
    """
    apple banana cherry date fig grape kiwi lemon mango orange peach pear plum berry melon tomato carrot onion potato
    bread butter cheese milk honey sugar coffee tea water cat dog bird fish horse cow sheep goat lion tiger bear wolf
    fox mouse rabbit frog car bus train boat plane bike house door window table chair lamp book pen paper clock phone
    key box bag cup plate spoon fork knife tree flower grass river lake mountain forest desert island beach city street
    bridge garden school music movie game ball song red green blue yellow black white silver gold sun moon star cloud
    rain snow wind fire stone iron glass wood zebra violin umbrella queen jacket engine needle rocket yogurt vase
    """
)
JOBS = listed(
    """
    doctor teacher nurse lawyer farmer pilot baker painter driver writer singer chef engineer designer judge actor
    dentist plumber gardener scientist
    """
)
COLORS = listed(
    """
    red green blue yellow black white silver gold orange purple brown pink gray
    """
)
CURRENCIES = listed(
    """
    USD EUR GBP JPY CHF CAD AUD CNY INR SEK NOK DKK PLN BRL MXN KRW
    """
)
DOMAINS = ["example.com", "mail.com", "example.org", "test.org", "work.net", "home.net", "lmkit.dev"]
WORLD_WORDS = listed(
    """
    café naïve über straße grüße mañana niño garçon crème škoda žlutý łódź ångström smørrebrød привет мир καλημέρα 你好
    世界 東京 こんにちは 안녕 مرحبا שלום 🙂 🚀 👍 🎉 ❤ ✓ € £ →
    """
)
ONSETS = listed(
    """
    b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sk sl st th tr
    """
)
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ou"]
CODAS = ["", "", "", "n", "r", "s", "l", "t", "m", "k", "x", "nd", "rt"]


def is_held_out(text: str) -> bool:
    """Whether this text is kept out of training: a fixed tenth of all texts, whatever their case and spacing."""
    canonical = " ".join(text.lower().split())
    return zlib.crc32(canonical.encode()) % HELD_OUT_ONE_IN == 0


def draw(make: Callable[[], T], held_out: bool, key: Callable[[T], str] = str) -> T:
    """Call `make` until its value lies on the asked side of the split."""
    while True:
        value = make()
        if is_held_out(key(value)) == held_out:
            return value


def made_up_word(rng: Random, min_syllables: int = 2, max_syllables: int = 3) -> str:
    """A lower-case word that means nothing: syllables, or the beginning of one real word and the end of another."""
    if rng.random() < SPLICED:
        first, second = (word.lower() for word in rng.sample(CITIES + NAMES + NOUNS + JOBS, 2))
        return first[: rng.randint(1, len(first))] + second[rng.randrange(len(second)) :]
    syllables = range(rng.randint(min_syllables, max_syllables))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in syllables)


def city(rng: Random, held_out: bool) -> str:
    """A real or invented city."""

    def make() -> str:
        roll = rng.random()
        if roll < 0.35:
            return rng.choice(CITIES)
        if roll < 0.42:
            return rng.choice(LONG_CITIES)
        word = made_up_word(rng, 1, 3).capitalize()
        return f"{rng.choice(['New', 'Port', 'San', 'Saint', 'North'])} {word}" if rng.random() < 0.15 else word

    value = draw(make, held_out)
    roll = rng.random()
    if roll < 0.1:
        return value.lower()
    return f"{value}, {rng.choice(REGIONS)}" if roll < 0.15 else value


def name(rng: Random, held_out: bool) -> str:
    """A real or invented first name."""
    return draw(lambda: rng.choice(NAMES) if rng.random() < 0.5 else made_up_word(rng, 1, 3).capitalize(), held_out)


def phrase(rng: Random, held_out: bool, max_words: int = 4) -> str:
    """One to `max_words` lower-case words, some of them invented."""

    def word() -> str:
        return rng.choice(NOUNS) if rng.random() < 0.6 else made_up_word(rng, 1, 3)

    return draw(lambda: " ".join(word() for _ in range(rng.randint(1, max_words))), held_out)


def email(rng: Random, held_out: bool) -> str:
    """An address made of a name and a domain."""
    return draw(lambda: f"{name(rng, held_out).lower()}@{rng.choice(DOMAINS)}", held_out)


def number(rng: Random, held_out: bool, limit: int = 1000) -> int:
    """A number from 1 to `limit`, small ones more often."""
    return draw(lambda: rng.randint(1, rng.choice([10, 100, limit])), held_out)


def clock_time(rng: Random, held_out: bool) -> str:
    """A time such as 09:41."""
    return draw(lambda: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}", held_out)


def accented(rng: Random, held_out: bool) -> str:
    """One to five words of letters beyond ASCII, and emoji: text whose characters are several tokens each."""
    return draw(lambda: " ".join(rng.choice(WORLD_WORDS) for _ in range(rng.randint(1, 5))), held_out)


def shuffled_keys(mapping: dict, rng: Random) -> dict:
    """The same dict in another order."""
    return dict(rng.sample(list(mapping.items()), len(mapping)))


def expand(pattern: str, rng: Random) -> str:
    """Replace each {a|b|c}, innermost first, by one of its alternatives."""
    while match := re.search(r"\{([^{}]*)\}", pattern):
        pattern = pattern[: match.start()] + rng.choice(match[1].split("|")) + pattern[match.end() :]
    return pattern


def casual(text: str, rng: Random, held_out: bool) -> str:
    """The same text as different people type it: lower case, capitals, missing or repeated punctuation.

    Training sees capitals more often than people type them, and evaluation asks.
    """
    capitals, titles = (0.03, 0.0) if held_out else (0.15, 0.08)
    roll = rng.random()
    if roll < 0.3:
        text = text.lower()
    elif roll < 0.3 + capitals:
        text = text.upper()
    elif roll < 0.3 + capitals + titles:
        text = capwords(text)
    else:
        text = text[:1].upper() + text[1:]
    return text + rng.choice(["", "", "?", "?", ".", "!", " ?", "??"])


OPENINGS = ["", "", "", "", "please ", "hey, ", "hi, ", "hello, ", "ok, ", "now ", "and ", "can you ", "could you "]
ENDINGS = ["", "", "", "", " please", ", please", " thanks", " now"]


def politely(text: str, rng: Random) -> str:
    """Sometimes wrap a request in small talk; never touches the request itself, whose values must be copied."""
    before = rng.choice(
        ["", "", "", "", "please ", "hey, ", "hi, ", "hello, ", "ok, ", "now ", "and ", "can you ", "could you "]
    )
    after = rng.choice(["", "", "", "", " please", ", please", " thanks", " now"])
    text = before + text + after
    return text if rng.random() < 0.4 else text[:1].upper() + text[1:]
