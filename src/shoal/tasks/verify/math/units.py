"""What may follow a number: the known units and nouns, and what the question asks for. Everything else is refused,
because a word that is not known may change the number: 5 twelfths, 5 quadrillion, 5 doubled.

    unit     cm, square feet, miles per hour         compared: 5 cm is not 5 kg
    phrase   [adjectives] noun [of noun] [per noun] [in total]      5 red marbles, 5 apples in total, $5 per day

A noun is known if it is in the table, or if the question asks how many of it there are. Containers and coins are not in
the table (5 boxes of 12 are not 5), so they are known only where they are asked for. `per noun` is known where the
question mentions it. Where it asks how many dozen or thousand of a thing there are, the answer must say so.
"""

import re
from collections.abc import Iterator

MONEY = {"$": "dollar", "\\pounds": "pound sterling", "\\euro": "euro"}
_DIMENSIONS = {
    "length": "mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; inch in; "
    "foot ft; yard yd; mile mi",
    "time": "second s sec; minute min; hour h hr; day; week; month; year yr; decade; century",
    "mass": "mg milligram; g gram; kg kilogram; pound lb; ounce oz; ton tonne",
    "volume": "ml milliliter millilitre; l liter litre; gallon; quart; pint; cup; tablespoon; teaspoon",
    "money": "dollar usd; cent; euro; pound~sterling",
    "angle": "degree deg; radian rad",
    "speed": "mph mile~per~hour; kmh kph km~per~hour; m~per~second",
    "": "unit; points; people person; item; times; calorie; watt; volt; amp; joule; newton; hertz; mole",
}
_GROUPS = [
    (dimension, [name.replace("~", " ") for name in group.split()])
    for dimension, groups in _DIMENSIONS.items()
    for group in groups.split(";")
]
_UNITS = {name: names[0] for _, names in _GROUPS for name in names}
_KINDS = {names[0]: dimension for dimension, names in _GROUPS}
_SHORT = {name for name in _UNITS if len(name) <= 3 and name not in ("day", "cup", "ton", "amp")}
_CASED = {"L": "l", "mL": "ml", "KM": "km", "Km": "km", "KG": "kg", "Kg": "kg", "CM": "cm", "USD": "usd"}
"""abbreviations are read as written: 5 M is no length; these are exceptions"""
_SQUARES = {"square": "^2", "sq": "^2", "cubic": "^3"}
_NOUNS = frozenset(
    """
    actor adult animal answer ant apartment apple article arm baby badge bagel ball balloon banana baseball
    basketball bat bead bean bear bed bee beetle berry bicycle bike bird biscuit block blueberry boat bone book bookmark
    boy bracelet bread brick brother brownie bug building bulb bus button cake calculator call camel candle candy
    capsule car card carnation carpet carrot cat chair cherry chicken child chip chocolate chore circle citizen class
    classmate client clip clown coach coat coin color comic computer cookie country cousin cow cracker crayon cricket
    cupcake customer dancer daughter delegate desk dessert diamond digit dinner dog doll donkey donut door doughnut
    drawing dress drink driver duck earring egg elephant employee engine episode equation eraser event face fan
    farmer father fiction figurine file finger fish flag flight floor flower fly flyer follower footballs forest frog
    fruit game gem gift giraffe girl goal goat goldfish goose grape grandchild guest guitar gumball haircut
    hamburger hat hen highlighter hole horse hotdog house insect integer jellybean joke judge juice jump kangaroo key
    kid kind kitten lamb lamp leaf leg lego lemon letter lily lion lizard lollipop mango man map marble marker match
    meal meatball member message minnow mirror model mosquito motorcycle mouse movie muffin mushroom nail necklace
    newspaper night note notebook number nut object onion option orange page paint painting pamphlet pancake panda paper
    paperclip parent park party passenger pastry patient peach peanut pear pen pencil penguin pepper pet phone photo
    picture pie pig pigeon pill pillow pineapple pizza plane plank plant plate player plum poem poodle popsicle postcard
    potato present prize problem program puppy pushup puzzle question rabbit racer rat ribbon rock room rose ruler
    runner sandwich scarf school seagull seashell seat seed sentence shark sheep shell shingle ship shirt shoe shop side
    singer sister skirt snail snake sneaker sock soldier solution son song spider spoke spoon squirrel stamp star step
    stick sticker stone store story strawberry straw street student subject suitcase sweater sweet swimmer table task
    tea teacher tent test text thing ticket tiger tile tire toad tomato tool toothbrush towel toy train tree
    triangle trip truck tulip turtle umbrella uncle van vase vegetable vehicle visit visitor volunteer vote walnut watch
    watermelon way wheel whale window woman word worker worm zebra
    cheese coffee flour food gas juice meat milk money oil rice salt sand soup sugar water
    """.split()  # noqa: SIM905
)
_PLURALS = dict(  # noqa: C408  # shorter than a literal
    children="child",
    grandchildren="grandchild",
    men="man",
    women="woman",
    people="person",
    feet="foot",
    teeth="tooth",
    mice="mouse",
    geese="goose",
    leaves="leaf",
    scarves="scarf",
    loaves="loaf",
    shelves="shelf",
    knives="knife",
)
_ADJECTIVES = frozenset(
    """
    red blue green yellow white black brown orange purple pink gray grey golden silver small large big little tiny long
    short tall old new young different distinct male female wild fresh sweet ripe rotten striped plain wooden plastic
    paper glass metal trading baseball tennis golf soccer football toy pet school story comic text math science
    """.split()  # noqa: SIM905
)
_TAIL = re.compile(
    r" (?:in total|in all|altogether|total|left|remaining|old|long|tall|wide|high|deep|away|ago|later|apart|each)$"
)
_RATE = re.compile(r"(?P<what>.*?)(?:^| )(?:per|every|each|a|an) (?P<rate>[a-z]+)")
_CHANGES = re.compile(
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|.*teen|.*ty|.*(?:th|ths)|thirds?|hundreds?"
    r"|thousands?|.*illions?|grand|dozens?|scores?|gross|hal(?:f|ves)|quarters?|doubled?|doubles|tripled?|triples|twice"
    r"|thrice|.*fold|squared?|cubed?|percent.*|permille|cent|plus|minus|times|over|less|fewer|more|not|or"
    r"|and|but|nor|than|modulo|mod|negative|inverse|reciprocal|factorial|root|powers?|point"
)
"""words that are no nouns even where the question asks for them"""
_COMPARED = ("more", "fewer", "times")
"""as in: how many more apples, how many times"""
_SCALES = frozenset(("dozen", "hundred", "thousand", "million", "billion", "trillion"))
_ASKED = re.compile(r"\b(?:how many|number of|how much)((?: [a-z]+(?:-[a-z]+)*){1,5})")
_MENTIONED_RATE = re.compile(r"\b(?:per|every|each|an?) ([a-z]+)")
_SPEED = re.compile(r"\b([a-z]+ per [a-z]+)")
_PER = re.compile(r"(?<=[A-Za-z]) ?/ ?(?:(h(?:ou)?r?)|(s(?:ec(?:ond)?)?))(?![A-Za-z])")
_MENTIONED = re.compile(
    r"(?:\b|(?<=[0-9]))(?:(?<=[0-9])|(?<=[0-9][ -])|(?=[A-Za-z]{4}|day|cup|ton|oz|lb))([A-Za-z]+)\b"
)
"""a word of four letters, or any after a number"""
_IN_UNIT = re.compile(r"\bin ((?:square |cubic )?[a-z]+(?: per [a-z]+)?)\b")
_STOP = frozenset(
    """
    did does do is are was were will would can could should shall must has have had he she it they we you i in on at to
    for from by with if when that who which there his her their its the this these those per each every all both not
    """.split()  # noqa: SIM905
)
_MAX_WORDS, _MAX_UNIT_WORDS = 8, 3


def read_unit(text: str, money: str) -> str | None:
    """The canonical name of a unit, empty without one, None for a word that is not a unit."""
    words = " ".join(text.replace("{", " ").replace("}", " ").split())
    if not words:
        return money
    words, caret, power = words.partition("^")
    first, _, rest = words.strip().partition(" ")
    square = _SQUARES.get(first.lower(), "")
    name = _find_unit(" ".join((rest if square else words).split()))
    if name is None or money not in ("", name) or (square and caret) or (caret and _KINDS[name] != "length"):
        return None
    return name + (square or (caret + power.strip()))


def lacks_scale(words: str, asked: frozenset[str]) -> bool:
    """Whether a question asks how many dozen or thousand of a thing there are, and the answer has only the thing."""
    scales = asked & _SCALES
    return bool(scales and words.strip()) and words.split()[0] not in scales


def read_phrase(text: str, money: str, asked: frozenset[str]) -> str | None:
    """What is counted, in the singular; None if a word is not known. For money only how often it is paid."""
    words = " " + " ".join(text.lower().split())
    if len(words.split()) > _MAX_WORDS:
        return None
    words = _TAIL.sub("", words).strip()
    if not words:
        return money
    rate = ""
    if (match := _RATE.fullmatch(words)) is not None:
        words, rate = match["what"], _name_thing(match["rate"], asked) or ""
        if f"per {rate}" not in asked or rate == "cent":  # 5 per cent
            return None
    if money:
        return money if rate and not words else None
    things = [_name_things(part, asked) for part in words.split(" of ")] if words else []
    if not things or None in things or len(things) > 2:
        return None
    return " of ".join(str(thing) for thing in things) + (f" per {rate}" if rate else "")


def is_other_unit(unit: str, asked: frozenset[str], *, is_counted: bool) -> bool:
    """Whether a question has no use for a unit: it asks for another one of the same kind (5 hours where it asks for
    minutes), or mentions none of that kind. `asked`: the units that it asks for or mentions; `is_counted`: it asks how
    many things there are, otherwise the unit of a time or an angle, and dollars, may be left to the reader."""
    kind = _find_kind(unit)
    if kind == "" or unit in asked:
        return False
    is_implied = not is_counted and (kind in ("time", "angle", "speed") or unit == "dollar")
    return not is_implied or any(_find_kind(name) == kind for name in asked)


def _find_kind(unit: str) -> str:
    """What a unit measures. An area is a kind of length: a question that asks for one does not ask for the other."""
    return _KINDS.get(unit.partition("^")[0], "")


def list_asked_nouns(question: str) -> Iterator[str]:
    """The words after "how many" and "number of", in the singular, and the rates that it mentions."""
    low = " ".join(question.lower().split())
    for match in _ASKED.finditer(low):
        for place, word in enumerate(match[1].split()):
            if word in _STOP:
                break
            if _CHANGES.fullmatch(word) is None or (place == 0 and (word in _COMPARED or _singular(word) in _SCALES)):
                yield _singular(word)
    yield from (f"per {_singular(match[1])}" for match in _MENTIONED_RATE.finditer(spell_rates(low)))


def list_asked_units(question: str) -> Iterator[str]:
    """The units that a question asks for; if it does not, those that it mentions."""
    words = spell_rates(" ".join(question.split()))
    low = words.lower()
    phrases = [match[1].split() for match in _ASKED.finditer(low)] + [m[1].split() for m in _IN_UNIT.finditer(low)]
    asked = set(filter(None, map(_read_first_unit, phrases)))
    speeds = {read_unit(match[1], "") for match in _SPEED.finditer(low)}
    units = {_name_unit(match[1]) for match in _MENTIONED.finditer(words)}
    mentioned = set(filter(None, speeds | units)) | ({"dollar"} if "$" in words else set())
    kinds = set(map(_find_kind, asked))
    kinds |= {"length"} if "speed" in kinds else set()
    yield from asked
    for name in mentioned:
        if _find_kind(name) not in kinds:
            yield from (name, f"{name}^2", f"{name}^3")


def spell_rates(text: str) -> str:
    """A text with km/h and m/s as words."""
    return _PER.sub(lambda match: " per hour" if match[1] else " per second", text)


def _read_first_unit(words: list[str]) -> str | None:
    """The longest unit that a phrase begins with."""
    found = (read_unit(" ".join(words[:size]), "") for size in range(_MAX_UNIT_WORDS, 0, -1))
    return next(filter(None, found), None)


def _find_unit(name: str) -> str | None:
    first, per, rest = name.partition(" per ")
    singular = _name_unit(first)
    if not per:
        return singular
    return _UNITS.get(f"{singular} per {rest.lower()}") if singular else None


def _name_unit(word: str) -> str | None:
    word = _CASED.get(word, word)
    if word.lower() in _SHORT:
        return _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
    return _UNITS.get(word.lower()) or _UNITS.get(_singular(word.lower()))


def _name_things(words: str, asked: frozenset[str]) -> str | None:
    *before, last = words.split() or [""]
    head = _name_thing(last, asked)
    if head is None or any(word not in _ADJECTIVES and _name_thing(word, asked) is None for word in before):
        return None
    return " ".join((*before, head))


def _name_thing(word: str, asked: frozenset[str]) -> str | None:
    name = _singular(word)
    if name in _NOUNS or name in asked:
        return name
    unit = None if word in _SHORT else _name_unit(word)
    return unit if unit is not None and _KINDS[unit] else None


def _singular(word: str) -> str:
    if word in _PLURALS:
        return _PLURALS[word]
    if word.endswith("ies") and len(word) > 4 and word not in ("cookies", "brownies", "movies"):
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes", "oes")) and word not in ("shoes",):
        return word[:-2]
    return word.removesuffix("s") if not word.endswith("ss") else word
