"""Find a key's value in a long list: the work that a pruned prompt makes hard, in a form a small model can do.

    Alice: seven lamps
    Henry: three coins
    ...
    Alice:                    -> which of four values of this list?

The paper measures this kind of reading with HotpotQA, which is beyond a model of 135 million parameters. The wrong answers are values of
other lines, so chance is one in four. A key is one word: with keys of two, which other lines share by halves, such a model is hardly better
than chance. Everything follows from the seed.
"""

import random

from datasets import Dataset

LINES = {256: 43, 512: 86, 1024: 172}  # the prompt's length in SmolLM2's tokens, about (Gemma's are a seventh fewer) -> its lines
ITEMS = 300

NAMES = """
Adam Alan Albert Alex Alice Amanda Amy Andrea Andrew Angela Anna Anthony Arthur Ashley Barbara Benjamin Betty Beverly Billy Bobby
Bradley Brandon Brian Bruce Bryan Carl Carol Carolyn Catherine Charles Charlotte Cheryl Christian Christina Christopher Cynthia Daniel
David Deborah Debra Denise Dennis Diana Diane Donald Donna Dorothy Douglas Dylan Edward Elizabeth Emily Emma Eric Ethan Eugene Evelyn
Frances Frank Gabriel Gary George Gerald Gloria Grace Gregory Hannah Harold Harry Heather Helen Henry Isabella Jack Jacob Jacqueline
James Jane Janet Janice Jason Jean Jeffrey Jennifer Jeremy Jerry Jesse Jessica Joan Joe John Jonathan Jordan Jose Joseph Joshua Joyce
Juan Judith Judy Julia Julie Justin Karen Katherine Kathleen Keith Kelly Kenneth Kevin Kimberly Kyle Larry Laura Lauren Lawrence Linda
Lisa Logan Louis Madison Margaret Maria Marie Marilyn Mark Martha Mary Matthew Megan Melissa Michael Michelle Nancy Natalie Nathan
Nicholas Nicole Noah Olivia Pamela Patricia Patrick Paul Peter Philip Rachel Ralph Randy Raymond Rebecca Richard Robert Roger Ronald
Rose Roy Russell Ruth Ryan Samantha Samuel Sandra Sarah Scott Sean Sharon Sophia Stephanie Stephen Steven Susan Teresa Terry Theresa
Thomas Timothy Tyler Victoria Vincent Virginia Walter Wayne William Willie Zachary
""".split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve twenty".split()
THINGS = "apples bags balls beds bells boats books boxes chairs coins cups doors hats keys lamps rings shoes stones tables trees".split()


def load(minipop_seed: int = 0, **_) -> dict[str, Dataset]:
    """For `custom_dataset`: ITEMS items, the three lengths in turn."""
    rng = random.Random(f"retrieval {minipop_seed}")
    lengths = list(LINES)
    return {"test": Dataset.from_list([item(rng, lengths[i % len(lengths)]) for i in range(ITEMS)])}


def item(rng: random.Random, length: int) -> dict:
    """One list of about `length` tokens: prompt, four choices, the label of the right one, and where its line stands (0 first, 1 last)."""
    lines = LINES[length]
    keys = rng.sample(NAMES, lines)
    values = [" ".join(pair) for pair in rng.sample([(a, b) for a in NUMBERS for b in THINGS], lines)]
    target = rng.randrange(lines)
    choices = [values[target], *rng.sample(values[:target] + values[target + 1 :], 3)]
    rng.shuffle(choices)
    text = "".join(f"{key}: {value}\n" for key, value in zip(keys, values))
    return {"prompt": f"{text}{keys[target]}:", "choices": choices, "label": choices.index(values[target]), "length": length,
            "depth": target / (lines - 1)}


def process_results(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    """acc: the right value is the likeliest of the four. exact_match: greedy decoding writes it. acc_256, ...: acc by length."""
    likelihoods = [likelihood for likelihood, _ in results]
    right = float(likelihoods.index(max(likelihoods)) == doc["label"])
    return {"acc": right, "exact_match": float(results[doc["label"]][1]), f"acc_{doc['length']}": right}
