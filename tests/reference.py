"""Tiny random models in minipop and in transformers, for the tests. The pairs themselves come from `minipop.compare`."""

import json
from pathlib import Path

import torch
import transformers

from minipop import ModelInputs, Runner, SamplingParams, load_model
from minipop.checkpoint import Checkpoint
from minipop.saving import save_checkpoint
from minipop.compare import FAMILIES, compare, load_reference, random_inputs, random_pair, random_reference

__all__ = ["FAMILIES", "TEXT_FAMILIES", "check", "compare", "edit_config", "gap", "image_prompt", "load_reference", "our_answer",
           "random_inputs", "random_pair", "random_reference", "read_tensors", "reference_answer", "rewrite", "token_ids"]

TEXT_FAMILIES = tuple(family for family in FAMILIES if not family.endswith("_vl"))
transformers.utils.logging.disable_progress_bar()


def check(model, reference, inputs=None, plan=None, max_new_tokens=8, tolerance=1e-5, **settings):
    """Everything `compare` looks at agrees: streams, K, V, logits, greedy answer, and the vision tower."""
    inputs = random_inputs(model.config) if inputs is None else inputs
    inputs = inputs if isinstance(inputs, ModelInputs) else ModelInputs(inputs)
    report = compare(model, reference, inputs, plan, max_new_tokens, tolerance, **settings)
    assert report.passed, f"\n{report}"
    return report


def gap(ours, theirs):
    """Largest difference, relative to the largest magnitude."""
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def token_ids(count, seed=0, vocab_size=90):
    """Random ids that no family uses for anything special."""
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def image_prompt(config, parts, seed=0):
    """ModelInputs from a list of ids (ints) and images: "image", or for Qwen3-VL its grid of patches (height, width)."""
    generator = torch.Generator().manual_seed(seed)
    vision, ids, pixels, grids = config.vision, [], [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        elif vision.kind == "siglip":
            ids += [config.image_token_id] * vision.tokens_per_image
            pixels.append(torch.rand(1, vision.in_channels, vision.image_size, vision.image_size, generator=generator) * 2 - 1)
        else:
            height, width = part
            ids += [config.image_token_id] * (height * width // vision.spatial_merge_size ** 2)
            size = vision.in_channels * vision.temporal_patch_size * vision.patch_size ** 2
            pixels.append(torch.rand(height * width, size, generator=generator) * 2 - 1)
            grids.append((1, height, width))
    return ModelInputs(ids, torch.cat(pixels) if pixels else None, torch.tensor(grids) if grids else None)


def our_answer(model, inputs, count=20, plan=None):
    """Greedy ids from the runner's own `generate`."""
    runner = Runner(model, plan, max_seq_len=len(inputs) + count)
    return list(runner.generate(inputs, SamplingParams(temperature=0, max_new_tokens=count)))


def reference_answer(reference, inputs, count=20):
    """Greedy ids from transformers' `generate`, with its own cache, masks and positions."""
    ids = inputs.token_ids[None]
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if inputs.pixel_values is not None:
        kinds = "mm_token_type_ids" if inputs.image_grid_thw is not None else "token_type_ids"
        prompt |= {"pixel_values": inputs.pixel_values, kinds: (ids == reference.config.image_token_id).long()}
    if inputs.image_grid_thw is not None:
        prompt["image_grid_thw"] = inputs.image_grid_thw
    if hasattr(reference.model, "rope_deltas"):
        reference.model.rope_deltas = None
    with torch.no_grad():
        answer = reference.generate(**prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return answer[0, len(inputs):].tolist()


# --- checkpoint folders -------------------------------------------------------------------------------------------------------

def edit_config(folder, drop=(), top=None, text_config=None, name="config.json"):
    """Change fields of config.json: `drop` removes keys, `top` sets some, `text_config` sets nested ones."""
    path = Path(folder) / name
    values = json.loads(path.read_text())
    for key in drop:
        values.pop(key, None)
    values |= top or {}
    if text_config is not None:
        values["text_config"] = values.get("text_config", {}) | text_config
    path.write_text(json.dumps(values))
    return values


def read_tensors(folder):
    with Checkpoint.open(folder) as checkpoint:
        return {name: checkpoint.tensor(name).clone() for name in checkpoint.names}


def rewrite(source, target, rename=lambda name: name, extra=None, without=(), config=None):
    """A copy of a checkpoint with other tensor names, more tensors, fewer tensors, or other config fields; loaded."""
    tensors = {rename(name): tensor for name, tensor in read_tensors(source).items() if name not in without}
    values = json.loads((Path(source) / "config.json").read_text()) | (config or {})
    save_checkpoint(target, tensors | (extra or {}), values)
    return load_model(target)
