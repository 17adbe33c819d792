"""Training batches: pictures with as many question-answer pairs as fit into a fixed number of tokens.

Two layouts. "apart": every question of a picture sees the picture and itself only, at the positions it would have if it came
first; so one pass over a picture trains several one-question prompts. "chat": the questions follow each other as the turns of
one conversation. Only answers (and the end of turn) carry loss.
"""
from __future__ import annotations

import random

import numpy as np
import torch

from . import scenes

PATCH, MERGE = 8, 2
N_TOKENS = 128
CHAT_SHARE = 0.2
# First step, share of pictures with something to read, share of pictures with two or three shapes only, weights of the questions.
# Reading comes first and telling places apart last, so that gets the middle of the training.
STAGES = ((0, 0.5, 0.0, scenes.SHAPE_MIX), (2500, 0.2, 0.4, scenes.PLACE_MIX), (7200, 0.4, 0.0, scenes.FINAL_MIX))


class Encoder:
    """Token ids of the prompt's pieces."""

    def __init__(self, tokenizer):
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.ends = lambda text: [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
        self.image = tokenizer.token_to_id("<|image_pad|>")
        self.pad = tokenizer.token_to_id("<|endoftext|>")
        self.head, self.tail = self.encode("<|im_start|>user\n<|vision_start|>"), self.encode("<|vision_end|>")
        self.reply = self.encode("<|im_end|>\n<|im_start|>assistant\n")
        self.end = self.encode("<|im_end|>")
        self.next_turn = self.encode("\n<|im_start|>user\n")

    def prefix(self, width: int, height: int):
        """Ids and (t, h, w) positions [3, n] of everything before the first question, and the next free position."""
        rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
        h, w = np.divmod(np.arange(rows * columns), columns)
        start = len(self.head)
        after = start + max(rows, columns)
        ids = self.head + [self.image] * (rows * columns) + self.tail
        before = np.tile(np.arange(start), (3, 1))
        image = np.stack([np.zeros_like(h), h, w]) + start
        tail = np.tile(after + np.arange(len(self.tail)), (3, 1))
        return ids, np.concatenate([before, image, tail], 1), after + len(self.tail)


def pack(encoder: Encoder, width: int, height: int, questions: list, n_tokens: int, chat: bool):
    """One sequence of N = n_tokens: ids [N], labels [N] (shifted: row i holds the token to predict after it, -100 where no loss),
    weights [N] of the labels (1 in all for each answer, so that a long one does not drown a short one),
    positions [3, N], segments [N] (0 the prefix, 1.. the questions, -1 padding), and `named`: (row, right, down) where a name in
    a question ends and how far right and down, from -1 to 1, the thing lies. Questions that do not fit are left out."""
    prefix, prefix_positions, start = encoder.prefix(width, height)
    ids, labels, segments, positions = list(prefix), [-100] * len(prefix), [0] * len(prefix), []
    weights = [0.0] * len(prefix)
    used, position, named = 0, start, []
    for asked in questions:
        turn = encoder.encode(asked.question) + encoder.reply
        if chat and used:
            turn = encoder.next_turn + turn
        answer = encoder.encode(asked.answer) + encoder.end
        if len(ids) + len(turn) + len(answer) > n_tokens:
            continue
        used += 1
        first = len(ids) + (len(encoder.next_turn) if chat and used > 1 else 0)
        ends = encoder.ends(asked.question) if asked.named else []
        named += [(first + ends.index(end), 2 * item.cx / width - 1, 2 * item.cy / height - 1) for end, item in asked.named]
        tokens = turn + answer
        ids += tokens
        labels += [-100] * (len(turn) - 1) + answer + [-100]
        weights += [0.0] * (len(turn) - 1) + [1 / len(answer)] * len(answer) + [0.0]
        segments += [0 if chat else used] * len(tokens)
        positions += list(range(position, position + len(tokens)))
        position = position + len(tokens) if chat else start
    fill = n_tokens - len(ids)
    text_positions = np.tile(np.array(positions + [0] * fill, dtype=np.int64), (3, 1))
    return (ids + [encoder.pad] * fill, labels + [-100] * fill, weights + [0.0] * fill,
            np.concatenate([prefix_positions, text_positions], 1), segments + [-1] * fill, named)


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """[B, N] -> [B, 1, N, N], 0 where a row may look and -inf elsewhere: backwards, at the prefix and at its own segment."""
    n = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    see = torch.ones(n, n, dtype=torch.bool).tril() & (same | (segments[:, None, :] == 0))
    return torch.zeros(see.shape).masked_fill_(~see, float("-inf"))[:, None]


def collate(pictures: list, rows: list) -> dict:
    ids, labels, weights, positions, segments, named = zip(*rows)
    named = [(sequence, *n) for sequence, of_sequence in enumerate(named) for n in of_sequence]
    return {"images": torch.from_numpy(np.stack([np.asarray(p) for p in pictures])), "ids": torch.tensor(ids),
            "labels": torch.tensor(labels), "weights": torch.tensor(weights),
            "positions": torch.from_numpy(np.stack(positions, 1)), "segments": torch.tensor(segments),
            "named": torch.tensor(named, dtype=torch.float32).view(-1, 4)}


def patch_places(width: int, height: int) -> np.ndarray:
    """[P, 2]: how far down and to the right each patch lies, from -1 to 1, in the order of the vision tower."""
    grids = np.meshgrid(np.linspace(-1, 1, height // PATCH), np.linspace(-1, 1, width // PATCH), indexing="ij")
    return np.stack([in_merge_order(grid) for grid in grids], 1).astype(np.float32)


def in_merge_order(grid: np.ndarray) -> np.ndarray:
    """[rows, columns] of patches -> [P] as the vision tower orders them, block of 2x2 by block."""
    rows, columns = grid.shape
    return grid.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(0, 2, 1, 3).reshape(-1)


class TrainingBatches:
    """Batch number i, the same whenever it is asked for. `ranks` batches in a row have pictures of one size, so that processes
    which train together take equally long over them."""

    def __init__(self, tokenizer, batch_size: int, seed: int, ranks: int = 1, easy_steps: int = 0,
                 n_tokens: int = N_TOKENS):
        self.easy_steps = easy_steps
        self.encoder, self.batch_size, self.seed, self.ranks = Encoder(tokenizer), batch_size, seed, ranks
        self.n_tokens = n_tokens

    def __getitem__(self, index: int) -> dict:
        rng = random.Random(f"sizes {self.seed} {index // self.ranks}")
        size = scenes.SIZES[0] if rng.random() < 0.6 else rng.choice(scenes.SIZES[1:])
        chat = rng.random() < CHAT_SHARE
        rng = random.Random(f"train {self.seed} {index}")
        step = index / self.ranks
        hard = step / self.easy_steps if self.easy_steps else 1.0           # share of scenes of full difficulty
        _, text_share, few_share, mix = [stage for stage in STAGES if step >= stage[0]][-1]
        texts = round(text_share * self.batch_size)
        pictures, rows, labels = [], [], []
        for k in range(self.batch_size):
            easy, few = rng.random() >= hard, k % 5 < 5 * few_share
            scene = scenes.make_scene(rng, text=k < texts, size=size, easy=easy, few=few)
            questions, seen, tries = [], set(), 0
            while len(questions) < 9 and tries < 40:
                tries += 1
                asked = scenes.ask(rng, scene, None if scene.texts else mix)
                if asked and asked.question not in seen:
                    seen.add(asked.question)
                    questions.append(asked)
            pictures.append(scenes.render(scene))
            rows.append(pack(self.encoder, *size, questions, self.n_tokens, chat))
            labels.append(np.stack([in_merge_order(x) for x in scenes.patch_labels(scene, PATCH)]))
        return collate(pictures, rows) | {"patch_labels": torch.from_numpy(np.stack(labels, 1)),
                                          "patch_places": torch.from_numpy(patch_places(*size))}


def question_batches(tokenizer, questions: list, batch_size: int = 64, n_tokens: int = 96):
    """Yields (indices into `questions`, batch) with one question a sequence, pictures of one size together."""
    encoder, by_size = Encoder(tokenizer), {}
    for i, (_, picture, _, _) in enumerate(questions):
        by_size.setdefault(picture.size, []).append(i)
    for size, members in by_size.items():
        for start in range(0, len(members), batch_size):
            chosen = members[start:start + batch_size]
            asked = [scenes.Question(*questions[i][:1], *questions[i][2:]) for i in chosen]
            yield chosen, collate([questions[i][1] for i in chosen], [pack(encoder, *size, [q], n_tokens, False) for q in asked])
