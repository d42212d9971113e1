"""Words to reverse, sort, upper-case and count letters in: real ones from a list, and pronounceable invented ones.

Called by `data.py`. The tokenizer spells every word of this file letter by letter (see `vocabulary.py`), because a model
that sees "planet" as one token cannot see its letters.
"""

# ruff: noqa: SIM905 (a list of words reads better as a text than as 261 quoted strings)

import random

ENGLISH_WORDS = tuple(
    """
    acorn almond amber anchor angel apple apron arrow atom autumn bacon badge bagel banana banjo barn basket beach beaver
    berry bicycle biscuit blanket bottle branch bread breeze bridge brook brush bubble bucket butter button cabin cactus
    camel camera candle canoe canyon carbon carpet carrot castle cedar cello chalk cheese cherry chess circle citrus clock
    cloud clover coast cobalt coconut coffee comet compass copper coral cotton cradle crane crater cricket crown crystal
    curtain daisy desert diamond dolphin donkey dragon drum eagle earth eclipse elbow ember emerald falcon
    feather ferry fiddle finger flame flute forest fossil fountain garden garlic ginger giraffe glacier globe goose grape
    guitar hammer harbor harvest hazel helmet hello hill honey horse iceberg igloo insect island ivory jacket jaguar
    jasmine jelly jewel jigsaw jungle kettle kitten kiwi ladder lagoon lake lantern lemon letter lily lion lizard lobster
    lotus magnet mango maple marble meadow melon meteor mirror monkey moon moss mountain muffin museum needle
    nickel noodle nutmeg oasis ocean olive onion orange orbit orchard otter oyster paddle palace panda panther paper
    parrot peach peanut pebble pencil pepper piano pillow pirate planet plasma plum pocket potato prairie prism pumpkin
    puzzle python quartz rabbit radish rainbow raven ribbon robin rocket saddle sailor salmon sandal saturn school
    shadow shell silver snow spider spoon spring squid stone storm sunset table tennis thunder tiger timber tomato
    tower train tulip tunnel turtle umbrella valley velvet violin walnut water whale willow window winter wizard wolf
    world yellow zebra zipper
    cat dog house music flower river friend summer red blue green
    computer elephant keyboard strawberry mississippi butterfly blueberry raspberry
    """.split()
)

SHOWN_OFTEN = ("strawberry", "banana", "mississippi", "hello", "world", "apple", "planet", "python", "computer", "coffee")
"""Typical words of first users; drawn more often than the rest of the list."""

_ONSETS = tuple("b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl gr pl pr sh sl sp st th tr".split())
_VOWELS = tuple("a e i o u a e i o u ai ea ee oo ou".split())
_ENDINGS = tuple("b d g k l m n p r s t x y ck ll nd nt rt ss st".split())
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def invented_word(source: random.Random, max_letters: int) -> str:
    """Draw a plausible English word of 3 to `max_letters` letters, made of one to three syllables."""
    while True:
        word = "".join(source.choice(_ONSETS) + source.choice(_VOWELS) for _ in range(source.randint(1, 3)))
        if source.random() < 0.6:
            word += source.choice(_ENDINGS)
        if 3 <= len(word) <= max_letters:
            return word


def scrambled_word(source: random.Random, max_letters: int) -> str:
    """Draw 3 to `max_letters` letters evenly, so that rare letters are learned as well as common ones."""
    return "".join(source.choice(_LETTERS) for _ in range(source.randint(3, max_letters)))


def any_word(source: random.Random, max_letters: int) -> str:
    """Draw a word from the list, invented or scrambled, with at most `max_letters` letters."""
    kind = source.random()
    if kind < 0.35:
        return invented_word(source, max_letters)
    if kind < 0.60:
        return scrambled_word(source, max_letters)
    while True:
        word = source.choice(SHOWN_OFTEN if kind < 0.66 else ENGLISH_WORDS)
        if len(word) <= max_letters:
            return word
