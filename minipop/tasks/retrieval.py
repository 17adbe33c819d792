"""Find a key's value in a long list: the work that a pruned prompt makes hard, in a form a small model can do.

    brave otter: seven lamps
    quiet fox: three coins
    ...
    quiet fox:                    -> which of four values of this list?

The paper measures this kind of reading with HotpotQA, which is beyond a model of 135 million parameters. The right line can only be found
by its whole key: other lines share one of its two words, and the wrong answers are taken from those. Chance is one in four. Everything
follows from the seed.
"""

import random

from datasets import Dataset

LINES = {256: 40, 512: 80, 1024: 162}  # the prompt's length in tokens, about (SmolLM2 and Gemma-3: within 5%) -> its lines
ITEMS = 300

ADJECTIVES = "brave bright calm clever cold dark fast green happy loud old quiet red sharp small soft tall warm wild young".split()
ANIMALS = "bear cat cow crab deer dog duck fish fox frog goat hawk horse lion mouse otter owl sheep tiger wolf".split()
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
    keys = rng.sample([(a, b) for a in ADJECTIVES for b in ANIMALS], lines)
    values = [" ".join(pair) for pair in rng.sample([(a, b) for a in NUMBERS for b in THINGS], lines)]
    target = rng.randrange(lines)
    near = [i for i, key in enumerate(keys) if i != target and set(key) & set(keys[target])]
    others = rng.sample(near, 3) if len(near) >= 3 else near + rng.sample([i for i in range(lines) if i != target and i not in near], 3 - len(near))
    choices = [values[i] for i in (target, *others)]
    rng.shuffle(choices)
    text = "".join(f"{' '.join(key)}: {value}\n" for key, value in zip(keys, values))
    return {"prompt": f"{text}{' '.join(keys[target])}:", "choices": choices, "label": choices.index(values[target]), "length": length,
            "depth": target / (lines - 1)}


def process_results(doc: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    """acc: the right value is the likeliest of the four. exact_match: greedy decoding writes it. acc_256, ...: acc by length."""
    likelihoods = [likelihood for likelihood, _ in results]
    right = float(likelihoods.index(max(likelihoods)) == doc["label"])
    return {"acc": right, "exact_match": float(results[doc["label"]][1]), f"acc_{doc['length']}": right}
