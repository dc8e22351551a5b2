"""`rules:COUNT`: short sentences under one rule each, for instruction-following models; verifier `text_rules`.

    Write a short sentence about honey in lowercase letters only. Use at least 4 words.

- Five rules: lowercase letters only, a given word, no comma, fewer than n words, fewer than n of a letter. All rules
  are equally frequent, with every topic and every phrasing; words and numbers are drawn.
- An answer needs `LEAST_WORDS` words, because the shortest ones would satisfy nearly every rule. Whether it is about
  its topic is not checked: that would take more than counting.
- Kin is the topic: a model is evaluated on topics that it never trained on, under all rules.
- The order is drawn once, and a longer set contains the shorter one.

Changing breaks: the hash of every such set.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.seeds import derive_seed
from shoal.tasks.base import ChatMessage
from shoal.tasks.sets.record import TaskRecord

SOURCE = "rules"
_TOPICS = (
    "apples", "bears", "bees", "bells", "birds", "boats", "books", "bread", "bridges", "candles", "cats", "chess",
    "clocks", "clouds", "coffee", "coins", "corn", "dancing", "deserts", "dogs", "dreams", "eggs", "fire", "fish",
    "flowers", "fog", "forests", "frogs", "gardens", "glass", "gold", "grass", "honey", "horses", "ice", "islands",
    "kites", "lamps", "leaves", "letters", "maps", "milk", "mirrors", "money", "mountains", "music", "night", "olives",
    "owls", "paint", "paper", "pears", "pianos", "rain", "rivers", "roads", "roses", "salt", "sand", "school", "sheep",
    "shoes", "silver", "sleep", "snow", "soup", "spring", "stars", "stone", "storms", "sugar", "summer", "swans",
    "tea", "the moon", "the sea", "the sun", "tigers", "towers", "trains", "trees", "water", "wheels", "whales",
    "wind", "windows", "wine", "winter", "wolves", "wood", "wool", "yarn",
)  # fmt: skip
_ASKS = ("Write a short sentence", "Write one sentence", "Write a line", "Write a few words", "Tell me something")
_WORDS = (
    "always", "bright", "cold", "deep", "early", "friend", "green", "happy", "home", "little", "long", "morning",
    "never", "old", "quiet", "red", "slow", "small", "soft", "strong", "warm", "white", "world", "yellow",
)  # fmt: skip
_LETTERS = "aeiost"
LEAST_WORDS = 4
_FEWER, _LEAST = "less than", "at least"
_NUM_WORDS = "length_constraints:number_words"
_NUM_RULES = 5
_ID_HEX = 16


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule as text, by IFEval's name, with its settings and a sentence that satisfies it."""

    words: str
    name: str
    settings: dict[str, Any]
    solve: Callable[[str], str]


def make_rules(count: int) -> Iterator[TaskRecord]:
    """`count` different tasks, or as many as there are."""
    listed = list(itertools.product(_ASKS, _TOPICS, range(_NUM_RULES)))
    random.Random(derive_seed("set", SOURCE)).shuffle(listed)
    for ask, topic, kind in listed[:count]:
        rng = random.Random(derive_seed("set", SOURCE, ask, topic, kind))
        yield _make_record(ask, topic, _draw_rule(kind, rng))


def _make_record(ask: str, topic: str, rule: _Rule) -> TaskRecord:
    text = f"{ask} about {topic} {rule.words}. Use at least {LEAST_WORDS} words."
    words = {"num_words": LEAST_WORDS, "relation": _LEAST}
    return TaskRecord(
        id=f"{SOURCE}-{rule.name.partition(':')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:_ID_HEX]}",
        source=SOURCE,
        task_type="text_rules",
        prompt=(ChatMessage("user", text),),
        info={"instruction_id_list": [rule.name, _NUM_WORDS], "kwargs": [rule.settings, words]},
        metadata={"kin": f"{SOURCE}-{topic}", "solution": rule.solve(topic)},
    )


def _draw_rule(kind: int, rng: random.Random) -> _Rule:
    match kind:
        case 0:
            return _Rule("in lowercase letters only", "change_case:english_lowercase", {}, "i like {} too.".format)
        case 1:
            word = rng.choice(_WORDS)
            text, solve = f'with the word "{word}" in it', f"I like {{}}, {word} one.".format
            return _Rule(text, "keywords:existence", {"keywords": [word]}, solve)
        case 2:
            return _Rule("without any commas", "punctuation:no_comma", {}, "I like {} too.".format)
        case 3:
            limit = rng.randint(6, 10)
            settings = {"num_words": limit, "relation": _FEWER}
            text = f"in fewer than {limit} words"
            return _Rule(text, _NUM_WORDS, settings, "I like {} too.".format)
        case _:
            letter, limit = rng.choice(_LETTERS), rng.randint(2, 4)
            settings = {"letter": letter, "let_frequency": limit, "let_relation": _FEWER}
            text = f'with the letter "{letter}" fewer than {limit} times'
            return _Rule(text, "keywords:letter_frequency", settings, lambda topic: "Run, my big cub.")
