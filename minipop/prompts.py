"""Prompts to measure a model with: the user's own, or a small set that is built in.

A file that ends in .jsonl is read as `minipop.generate` reads its input (texts or conversations, with pictures where the checkpoint takes
them). Any other file is text, and each of its paragraphs (blank lines lie between them) is one prompt. Texts become the user's turn of a
conversation where the checkpoint has a chat template, and are continued as they are where it has none.

The built-in set holds 40 questions, tasks and short contexts; for a vision-language checkpoint 40 pictures of plain coloured shapes,
drawn here, with a question about each.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from .errors import PromptError
from .files import open_regular
from .generate import Prompt, read_prompts
from .tokenizer import Tokenizer

BUILT_IN = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "List five things to check before a long bicycle tour.",
    "Translate into French: The train to Lyon leaves at half past seven.",
    "A baker makes 24 rolls an hour. How many does he make in six and a half hours? Show your steps.",
    "Write a Python function that returns the second largest number of a list.",
    ("Summarise in one sentence: The museum will close its east wing in May for repairs. The roof has leaked since the storm of last "
     "autumn, and three paintings had to be moved. The west wing and the garden stay open to visitors throughout the summer."),
    "What is the difference between a virus and a bacterium?",
    "Give me a polite email that asks a landlord to repair a heater.",
    "Continue the story: The letter had been under the floorboards for ninety years when Ada found it.",
    "Name three rivers in South America and the countries they flow through.",
    "Is the following review positive or negative? The soup was cold, the waiter was rude, and we waited an hour for the bill.",
    "How does a refrigerator keep food cold?",
    "Correct the grammar: Him and me was going to the market when it start to rain.",
    "Explain the rules of rock, paper, scissors.",
    "Write the SQL query that counts the orders of each customer in a table orders(id, customer, total).",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Turn this into a list of ingredients: For the dough take two cups of flour, a spoon of yeast, some salt, warm water and oil.",
    "Why do leaves change their colour in autumn?",
    "If all roses are flowers and some flowers fade quickly, do all roses fade quickly? Explain.",
    "Suggest a name for a small bookshop that also sells coffee.",
    "What happened in the year 1969 that people still talk about?",
    "Read the text and answer. Mira has a brother, Tom, who is three years younger. Tom turned nine last week. How old is Mira?",
    "Describe how to tie a shoelace, step by step.",
    "What are the advantages and disadvantages of working from home?",
    "Explain what recursion is, with an example.",
    "Write a dialogue between a cat and a goldfish.",
    "How many minutes are there in a leap year?",
    "Rewrite more formally: Hey, can't make it tomorrow, my kid's sick. Let's meet next week?",
    "What do plants need in order to grow?",
    "Which planet is the largest in our solar system, and how large is it compared with the Earth?",
    "Give a short biography of Marie Curie.",
    "Extract the names and the dates: On 3 March Ms Okafor met Dr Lindqvist in Oslo; they will meet again on 12 June.",
    "What should I do if I spill coffee on my keyboard?",
    "Write a headline for an article about a town that planted ten thousand trees.",
    "Convert 68 degrees Fahrenheit to Celsius.",
    "Why is it hard to predict the weather more than two weeks ahead?",
    "The following code prints nothing. Why?\n\nfor i in range(5, 1):\n    print(i)",
    "Tell me a fact about octopuses that most people do not know.",
)
COLOURS = {"red": (220, 30, 35), "green": (30, 155, 55), "blue": (35, 75, 220), "yellow": (242, 208, 20), "black": (15, 15, 15)}
SHAPES = ("circle", "square", "triangle")
PICTURES = 40


def measuring_prompts(path: str | None, tokenizer: Tokenizer, pictures: bool) -> list[Prompt]:
    """The prompts of a file, or the built-in ones. pictures: whether the checkpoint takes any.

    Raises PromptError for a file that cannot be read or holds no prompts.
    """
    if path is not None and path.endswith(".jsonl"):
        return read_prompts(path)
    if path is None and pictures:
        return [drawn_prompt(index) for index in range(PICTURES)]
    texts = BUILT_IN if path is None else paragraphs(path)
    name = "built-in prompt" if path is None else f"{path} paragraph"
    contents = [[{"role": "user", "content": text}] for text in texts] if tokenizer.has_chat_template else texts
    return [Prompt(f"{name} {i + 1}", i, None, content, Path()) for i, content in enumerate(contents)]


def paragraphs(path: str) -> list[str]:
    """The paragraphs of a text file, stripped."""
    with open_regular(Path(path), PromptError) as file:
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as problem:
            raise PromptError(f"{path}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    if not any(found):
        raise PromptError(f"{path}: there is no text in it")
    return ["\n".join(lines).strip() for lines in found if lines]


@dataclass(frozen=True)
class DrawnPrompt(Prompt):
    """A prompt with a picture that is drawn, not read: its number stands for it."""

    @property
    def digest(self) -> str:
        return self.where


def drawn_prompt(index: int) -> DrawnPrompt:
    """Two to four shapes of different kinds or colours on a light 96 x 96 picture, and a question about one of them."""
    rng = random.Random(index)
    picture = Image.new("RGB", (96, 96), (rng.randint(235, 255),) * 3)
    draw = ImageDraw.Draw(picture)
    corners = rng.sample([(8, 8), (54, 8), (8, 54), (54, 54)], rng.randint(2, 4))
    things = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], len(corners))
    for (x, y), (colour, shape) in zip(corners, things):
        size = rng.randint(22, 34)
        if shape == "triangle":
            draw.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], fill=COLOURS[colour])
        else:
            (draw.ellipse if shape == "circle" else draw.rectangle)((x, y, x + size, y + size), fill=COLOURS[colour])
    colour, shape = rng.choice(things)
    question = rng.choice((f"Where is the {colour} {shape}?", f"How many {colour} shapes are there?", f"How many {shape}s are there?",
                           f"What size is the {colour} {shape}?", "Describe the picture."))
    content = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]
    return DrawnPrompt(f"built-in picture {index + 1}", index, None, content, Path())
