"""The requests of the main job: one system prompt, a note for each user, now and then a long one.

All texts are this project's own. Every `LONG_EVERY`-th request brings several notes: its prompt
is longer than one turn of the engine computes, so it is taken off in mid-prefill.
"""

from __future__ import annotations

import random
from typing import Any

SYSTEM = (
    "You are the assistant of a small public library. Readers send you a note they have copied "
    "from one of our books, together with a question about it. Answer in full sentences and in a "
    "friendly tone. Begin with the answer itself, then give the reasons for it, step by step, and "
    "name the part of the note on which each reason rests. Explain every technical word the first "
    "time you use it. If the note doesn't settle the question, say so plainly and tell the reader "
    "what else would have to be known. Never invent a source, a number or a name. Write at least "
    "two paragraphs, and close with one sentence that tells the reader where to look next."
)

NOTES = {
    "tides": (
        "The sea at our harbour rises and falls twice a day. The old keepers noticed that the "
        "highest water comes a little after the new and the full moon, and that the weakest "
        "tides fall in the weeks between. They kept a table of hours painted on the wall."
    ),
    "bread": (
        "A baker mixes flour, water and salt with a piece of yesterday's dough. After some hours "
        "in a warm room the dough has doubled. In a cold cellar the same dough needs a whole "
        "night, but the loaf keeps longer and its crust is darker and tastes of nuts."
    ),
    "bees": (
        "When a bee has found a good meadow it returns and runs in a figure of eight on the comb. "
        "The angle of its run against the vertical is the angle between the meadow and the sun. "
        "The longer it shakes its body, the farther the others have to fly."
    ),
    "glass": (
        "Sand alone melts only in a very hot fire. The old glass makers added ash of beech trees, "
        "which let the sand melt sooner, and a little lime, without which the glass would have "
        "dissolved slowly in water. Iron in the sand coloured their windows green."
    ),
    "clocks": (
        "A pendulum of one metre needs about one second for each swing, whether the swing is wide "
        "or narrow, as long as it stays small. In summer the rod grows longer and the clock loses "
        "time. Makers hung jars of mercury on the rod to undo that."
    ),
    "maps": (
        "The surface of a ball can't be spread on a table without being torn or stretched. "
        "Sailors liked charts on which a straight line keeps the same angle to north. On such "
        "charts the lands near the poles look far bigger than they are."
    ),
    "soil": (
        "Farmers of the valley sow beans after two years of wheat. Small knots grow on the roots "
        "of the beans, and in the year that follows the wheat stands higher. A field that carried "
        "wheat each year became poor and grey within ten summers."
    ),
    "printing": (
        "Each letter was cast in metal, set in a frame, inked and pressed on damp paper. A page "
        "took a day to set, but then hundreds of sheets could be pulled in an hour. When the book "
        "was finished the letters went back to their boxes for the next one."
    ),
    "ice": (
        "A lake freezes from above. Water is heaviest a few degrees before it turns to ice, so in "
        "autumn the coldest water floats, and the deep stays at four degrees all winter. Fish "
        "rest there. A pond that is too shallow freezes down to its bed."
    ),
    "canals": (
        "A barge that has to climb a hill enters a chamber with two gates. The lower gate is shut "
        "and water is let in from above until the barge floats at the level of the upper canal. "
        "Each passage costs the upper canal one chamber of water."
    ),
    "music": (
        "A string that is half as long sounds the same note one octave higher. At two thirds of "
        "its length it sounds a fifth above. If a tuner goes up by twelve pure fifths he doesn't "
        "quite return to his first note, and has to share out the rest."
    ),
    "salt": (
        "In the salt gardens by the coast the sea flows into wide and very flat basins. Sun and "
        "wind carry the water away. The first basin keeps the chalk, the second the gypsum, and "
        "only in the third does the white salt appear that is raked together in August."
    ),
    "moss": (
        "Moss has no roots and no vessels. It drinks with its whole surface and can dry out until "
        "it crumbles between the fingers. An hour after the first rain it is green again. On our "
        "roofs it grows on the shaded side, where the dew stays longest."
    ),
    "bridges": (
        "The stones of an arch are pressed together by their own weight, so that it needs no "
        "mortar. While it is being built it rests on a frame of wood. Only when the last stone is "
        "set in the middle may the frame be taken away, and the feet must not give way."
    ),
    "wool": (
        "A hair of wool is covered with tiny scales. If it is moved about in warm water the "
        "scales hook into each other and the cloth becomes thick and small. Shepherds made coats "
        "of it that kept out the rain. Linen has no scales and doesn't shrink that way."
    ),
    "stars": (
        "A photograph taken of the night sky over some hours shows circles around one point that "
        "hardly moves. Stars near that point never set. Those farther away rise four minutes "
        "earlier each evening, so that winter and summer have skies of their own."
    ),
}

QUESTIONS = (
    "Please explain to me in detail why this is so, as if I heard of it for the first time.",
    "Which cause does the note give, and what would happen if that cause were missing?",
    "How could I show this to a class of children with things that are found in any kitchen?",
    "What would a careful reader doubt in this note, and how could the doubt be settled?",
)

LONG_EVERY = 6  # request 2, 8, 14, ... is a long one
LONG_NOTES = 5


def make_prompts(tokenizer: Any, num_requests: int, seed: int) -> list[list[int]]:
    """Return `num_requests` prompts as token ids: ~250 tokens each, every 6th ~500.

    The same arguments give the same prompts; another `seed` draws other notes and questions.
    """
    draw = random.Random(seed)
    topics: list[str] = []
    prompts = []
    for index in range(num_requests):
        count = LONG_NOTES if index % LONG_EVERY == 2 else 1
        while len(topics) < count:
            topics += draw.sample(sorted(NOTES), len(NOTES))
        chosen = [topics.pop() for _ in range(count)]
        question = draw.choice(QUESTIONS)
        if count > 1:
            question = "Compare these notes with each other. " + question
        notes = "\n\n".join(f"Note on {topic}: {NOTES[topic]}" for topic in chosen)
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{notes}\n\nReader {index + 1} asks: {question}"},
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def random_prompts(
    vocab_size: int, num_requests: int, seed: int, *, shared: int = 40, own: int = 30
) -> list[list[int]]:
    """Return prompts of random ids with a shared start, for models without a tokenizer."""
    draw = random.Random(seed)
    start = [draw.randrange(vocab_size) for _ in range(shared)]
    prompts = []
    for index in range(num_requests):
        length = own * (LONG_NOTES if index % LONG_EVERY == 2 else 1) + draw.randrange(own)
        prompts.append(start + [draw.randrange(vocab_size) for _ in range(length)])
    return prompts
