"""What goes into a model: one sequence of token ids, with its images if it has any."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import PromptError


@dataclass
class ModelInputs:
    """ONE sequence, image placeholders already expanded to one token for each image row.

    token_ids: LongTensor [N] (a [1, N] tensor or a list of ints is accepted and flattened).
    pixel_values: None, or as the reference processors make them: Qwen3-VL [patches, C*2*P*P], Gemma-3 [images, 3, S, S].
    image_grid_thw: Qwen3-VL only: LongTensor [images, 3], the patches over time, height and width.
    """

    token_ids: Tensor
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None

    def __post_init__(self):
        ids = self.token_ids
        try:
            ids = ids if isinstance(ids, Tensor) else torch.tensor(ids)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise PromptError("token_ids must be whole numbers: a list of ints or an integer tensor") from None
        if ids.numel() == 0:
            ids = ids.reshape(-1).long()
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise PromptError(f"token_ids must be whole numbers, not {ids.dtype}")
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1:
            raise PromptError(f"ModelInputs holds one sequence: token_ids must be [N] or [1, N], not {list(ids.shape)}")
        self.token_ids = ids.long()

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @classmethod
    def from_reference(cls, batch) -> "ModelInputs":
        """From the mapping a transformers processor returns for a batch of one (input_ids [1, N], pixel_values, ...)."""
        ids = torch.as_tensor(batch["input_ids"])
        mask = batch.get("attention_mask")
        if mask is not None and ids.dim() == 2 and ids.shape[0] == 1:  # drop padding, on whichever side it is
            ids = ids[:, torch.as_tensor(mask)[0].bool()]
        pixels = batch.get("pixel_values")
        grid = batch.get("image_grid_thw")
        return cls(ids, None if pixels is None else torch.as_tensor(pixels), None if grid is None else torch.as_tensor(grid))


@dataclass
class Batch:
    """Sequences side by side, padded on the right with id 0.

    token_ids: LongTensor [B, N] (CPU). counts: LongTensor [B], the real tokens of each row.
    pixel_values, image_grid_thw: the images of all rows, in order, or None.
    images: for each row its images as (first token, number of tokens).
    """

    token_ids: Tensor
    counts: Tensor
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    images: tuple[tuple[tuple[int, int], ...], ...] = ()

    @classmethod
    def of(cls, sequences: list[ModelInputs], model) -> "Batch":
        """Check every sequence against the model and lay them side by side. Raises PromptError; touches nothing else."""
        config = model.config
        places = []
        for sequence in sequences:
            check_token_ids(sequence.token_ids, config, placeholders=True)
            rows = model.image_counts(sequence.pixel_values, sequence.image_grid_thw)
            places.append(place_images(sequence.token_ids, config.image_token_id, rows))
        counts = torch.tensor([len(s) for s in sequences])
        token_ids = torch.zeros(len(sequences), int(counts.max()), dtype=torch.long)
        for row, sequence in zip(token_ids, sequences):
            row[: len(sequence)] = sequence.token_ids
        pixels = [s.pixel_values for s in sequences if s.pixel_values is not None]
        grids = [s.image_grid_thw for s in sequences if s.image_grid_thw is not None]
        return cls(token_ids, counts, torch.cat(pixels) if pixels else None, torch.cat(grids) if grids else None, tuple(places))


def check_token_ids(token_ids: Tensor, config, placeholders: bool = False) -> None:
    """Raises PromptError when an id is not one of the model's. `placeholders`: image tokens are, whatever their id."""
    wrong = (token_ids < 0) | (token_ids >= config.vocab_size)
    if placeholders and config.image_token_id is not None:  # may lie beyond the vocabulary: its embedding is never looked up
        wrong &= token_ids != config.image_token_id
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise PromptError(f"token id {int(token_ids[place])} at position {place[-1]} is outside the vocabulary of "
                          f"{config.vocab_size}: the tokenizer and the model do not belong together")


def place_images(token_ids: Tensor, image_token_id: int | None, rows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Find each image's placeholders. token_ids [N]; rows: tokens each image takes. -> ((first token, count), ...).

    Raises PromptError when placeholders and images do not match one to one.
    """
    found = [] if image_token_id is None else (token_ids == image_token_id).nonzero()[:, 0].tolist()
    if len(found) != sum(rows):
        raise PromptError(f"the prompt holds {len(found)} image tokens but its {len(rows)} images make {sum(rows)} rows: each "
                          "image needs exactly its own placeholders, expanded to one token a row")
    places, used = [], 0
    for number, count in enumerate(rows):
        run = found[used : used + count]
        if run[-1] - run[0] != count - 1:
            raise PromptError(f"the {count} tokens of image {number + 1} are not next to each other in the prompt")
        places.append((run[0], count))
        used += count
    return tuple(places)
