"""Pairs are built once and shared: nothing in these tests changes a model's weights."""

import pytest
import torch

from tests.reference import random_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """pair(family, seed=0, **overrides) -> (our model, transformers' model); pair.folder(...) -> where it was saved."""
    torch.set_num_threads(1)
    made = {}

    def build(family, seed, overrides):
        key = (family, seed, repr(sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, random_pair(family, seed, folder, **overrides))
        return made[key]

    def get(family, seed=0, **overrides):
        return build(family, seed, overrides)[1]

    get.folder = lambda family, seed=0, **overrides: build(family, seed, overrides)[0]
    return get
