"""The task of the distillation studies: forty things, questions about them, and one short sentence to show for each.

Knows: the questions, the demonstrations, what counts as an answer, and the split. Does not know: servers or recipes.

Subjects are split once and for all: what is measured is asked about things of which nothing was ever shown.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

FACTS = {
    "lakes": "Lakes are large bodies of still water.",
    "bees": "Bees are insects that make honey.",
    "bread": "Bread is a food made from flour and water.",
    "chairs": "Chairs are seats with a back and legs.",
    "rivers": "Rivers carry water from hills to the sea.",
    "clocks": "Clocks show what time it is.",
    "apples": "Apples are sweet fruits that grow on trees.",
    "bridges": "Bridges let people cross over water.",
    "candles": "Candles give light when they burn.",
    "trains": "Trains carry people and goods on rails.",
    "gardens": "Gardens are places where plants are grown.",
    "windows": "Windows let light into a room.",
    "horses": "Horses are strong animals that people ride.",
    "guitars": "Guitars are instruments with six strings.",
    "islands": "Islands are land with water all around.",
    "mirrors": "Mirrors show whatever stands before them.",
    "deserts": "Deserts are dry places with little rain.",
    "pillows": "Pillows are soft things to rest a head on.",
    "hammers": "Hammers are tools that drive nails.",
    "forests": "Forests are places with very many trees.",
    "cameras": "Cameras are used to take pictures.",
    "castles": "Castles are old buildings with thick walls.",
    "gloves": "Gloves keep hands warm in winter.",
    "kettles": "Kettles are used to boil water.",
    "ladders": "Ladders help people to reach high places.",
    "magnets": "Magnets pull on things made of iron.",
    "needles": "Needles are thin tools for sewing.",
    "pencils": "Pencils are used to write and draw.",
    "rabbits": "Rabbits are small animals with long ears.",
    "tunnels": "Tunnels are ways that lead under the ground.",
    "violins": "Violins are played with a bow.",
    "whales": "Whales are huge animals that live in the sea.",
    "stars": "Stars are far away suns.",
    "boots": "Boots are shoes that cover the ankles.",
    "doctors": "Doctors help people who are ill.",
    "farmers": "Farmers grow food on their land.",
    "kites": "Kites fly in the wind on a string.",
    "lamps": "Lamps light up dark rooms.",
    "owls": "Owls are birds that hunt at night.",
    "spoons": "Spoons are used to eat soup.",
}
TEMPLATES = ("What are {}?", "Tell me about {}.", "What can you say about {}?", "How would you describe {}?")
OTHER = (
    "In many parts of the world there are different opinions about this, and in order to understand them one has to "
    "look at how they came to be, who was involved at the time, and which of the many reasons that were given then"
)
"""What placebos show: long, about nothing, no statement."""
HELD = 10  # subjects that are only measured
LIMIT = 24  # tokens in which an answer must have come to its end
LEAST, MOST = 3, 16  # words of an answer


@dataclass(frozen=True, slots=True)
class Question:
    subject: str
    text: str

    @property
    def shown(self) -> str:
        return FACTS[self.subject]


def split() -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """(demonstrated, only measured): every subject is in one of them with all its questions."""
    subjects = list(FACTS)
    random.Random(9).shuffle(subjects)
    made = [[Question(subject, form.format(subject)) for form in TEMPLATES] for subject in subjects]
    return tuple(q for each in made[HELD:] for q in each), tuple(q for each in made[:HELD] for q in each)


def good(text: str, finish: str) -> bool:
    """The score: one statement of a few words that came to its end by itself."""
    return finish == "stop" and LEAST <= words(text) <= MOST and len(re.findall(r"[.!?](?:\s|$)", text.strip())) <= 1


def words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def names(question: Question, text: str) -> bool:
    """Whether an answer speaks of what was asked about."""
    return re.search(rf"\b{question.subject.rstrip('s')}", text, re.IGNORECASE) is not None
