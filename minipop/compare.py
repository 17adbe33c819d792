"""Layer by layer against the reference: the same checkpoint in minipop and in transformers, every tensor side by side.

    python -m minipop.compare --ckpt path [--ratio 1/3] [--prompt TEXT] [--image FILE ...]
    python -m minipop.compare --random qwen3_vl --skip-layers 1,4-5

Compared are the residual stream after each layer, the K and V rows each layer leaves in its cache, the logits, the greedy answer,
and for pictures the vision tower's stream and the rows it hands over. The first line that differs says where to look.

For a plan that skips layers there is no other implementation to ask, so this file makes one out of transformers' own modules:
the prompt's text stack runs twice, as in the paper (arXiv 2602.03295, section 3), and what the skipped layers do in the first
pass is put in their place (`_kv_only`). Masks, positions, pictures and the loop over the layers stay transformers'.

Shapes: T tokens compared, D hidden, K kv heads, E head_dim, R image rows.
"""

import argparse
import inspect
import json
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import resolve_checkpoint
from .cli import Parser, add_plan_arguments, check_device, clean_text, plan_from, run
from .config import DTYPES, ModelConfig
from .errors import CheckpointError, MinipopError, PlanError, PromptError
from .files import read_json, write_text
from .inputs import ModelInputs
from .models import load_model
from .plan import PrefillPlan
from .processing import load_processor
from .runner import Runner
from .tokenizer import load_tokenizer

FLOAT32_TOLERANCE = 1e-4  # of the tensor's largest magnitude: rounding, added up over the layers
ROUNDINGS = 3.0  # in low precision: how many times the reference's own distance from float32 ours may be away from it
PROMPT = "The quick brown fox jumps over the lazy dog, and then it"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_vl", "qwen3_vl")
ORDER = ("vision_resid", "vision_deepstack", "vision_out", "resid", "k", "v", "logits")  # of their making

Tensors = dict[tuple[str, int | None], Tensor]  # (name, layer) -> float32, tokens first


# --- what comes out -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class LayerDifference:
    """One tensor of ours against the reference's. `layer` is -1 for the embedding and None for logits."""

    name: str  # one of ORDER
    layer: int | None
    max: float  # largest and mean absolute difference
    mean: float
    largest: float  # the reference's largest magnitude
    allowed: float  # the largest `relative` that counts as equal

    @property
    def relative(self) -> float:
        return self.max / self.largest if self.largest else (0.0 if self.max == 0 else math.inf)

    @property
    def passed(self) -> bool:
        return self.relative <= self.allowed  # false for NaN


@dataclass(frozen=True)
class Report:
    """Everything a comparison found. `passed` is the verdict."""

    family: str
    dtype: str
    plan: str
    prompt_tokens: int
    answer_tokens: int  # answer tokens that both fed back, so that their rows could be compared too
    differences: tuple[LayerDifference, ...]
    our_ids: list[int]
    reference_ids: list[int]
    our_text: str | None = None
    reference_text: str | None = None

    @property
    def same_answer(self) -> bool:
        return self.our_ids == self.reference_ids

    @property
    def passed(self) -> bool:
        """Every difference within its bound; in float32 also the same greedy answer."""
        return all(d.passed for d in self.differences) and (self.same_answer or self.dtype not in ("float32", "float64"))

    @property
    def worst(self) -> LayerDifference:
        """The difference that comes closest to its bound, or exceeds it most."""
        return max(self.differences, key=lambda d: math.inf if math.isnan(d.relative) else d.relative / max(d.allowed, 1e-30))

    def of(self, name: str) -> dict[int | None, LayerDifference]:
        """Layer -> difference, for one of the names in ORDER."""
        return {d.layer: d for d in self.differences if d.name == name}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; numbers that are not finite become strings."""
        differences = [{k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
                        for k, v in {**asdict(d), "relative": d.relative, "passed": d.passed}.items()} for d in self.differences]
        return {**asdict(self), "differences": differences, "same_answer": self.same_answer, "passed": self.passed}

    def __str__(self) -> str:
        lines = [f"{self.family} in {self.dtype}; {self.plan}",
                 f"compared: {self.prompt_tokens} tokens of the prompt and {self.answer_tokens} of the answer",
                 "columns: max and mean absolute difference, max relative to the reference's largest magnitude; ! = too large"]
        for title, names in (("vision tower", ORDER[:3]), ("decoder", ORDER[3:6]), ("", ORDER[6:])):
            tables = {name: self.of(name) for name in names}
            layers = dict.fromkeys(layer for table in tables.values() for layer in table)
            if not layers:
                continue
            lines += ["", f"{title:<13}{''.join(f'{name:<31}' for name in names)}".rstrip()]
            for layer in layers:
                cells = "".join(_cell(tables[name].get(layer)) for name in names)
                lines.append(f"{_layer_name(layer):<13}{cells}".rstrip())
        lines += ["", f"our greedy answer       {self.our_ids}", f"reference greedy answer {self.reference_ids}"]
        if self.our_text is not None:
            lines += [f"our text                {self.our_text!r}", f"reference text          {self.reference_text!r}"]
        worst = self.worst
        place = worst.name if worst.layer is None else f"{worst.name} of {_layer_name(worst.layer)}"
        lines += ["", f"{'EQUAL' if self.passed else 'DIFFERENT'}: the worst difference is {worst.relative:.1e} in {place} "
                      f"(allowed: {worst.allowed:.1e}); the greedy answers are {'the same' if self.same_answer else 'different'}"]
        return "\n".join(lines)


def _layer_name(layer: int | None) -> str:
    return "logits" if layer is None else "embedding" if layer < 0 else f"layer {layer}"


def _cell(difference: LayerDifference | None) -> str:
    if difference is None:
        return " " * 31
    mark = "  " if difference.passed else " !"
    return f"{difference.max:.1e}  {difference.mean:.1e}  {difference.relative:.1e}{mark}   "


# --- the comparison -----------------------------------------------------------------------------------------------------------

def compare(model: nn.Module, reference: nn.Module, inputs: ModelInputs, plan: PrefillPlan | None = None,
            max_new_tokens: int = 20, tolerance: float | None = None, decode: Callable[[list[int]], str] | None = None,
            **settings) -> Report:
    """Run one prompt through both and compare everything; then decode greedily on both sides, up to an end-of-text id.

    model: from `load_model`. reference: transformers' model of the same checkpoint, dtype and device (`load_reference`).
    plan: None = skip nothing. tolerance: largest difference relative to a tensor's largest magnitude; None = 1e-4 in float32.
    In bfloat16 and float16, None asks the reference itself what rounding costs: it runs a second time in float32, and each tensor
    of ours may be ROUNDINGS times as far from the reference's as that is from float32. Two programs that round differently are
    each about that far from the exact value, so about sqrt(2) times as far from each other; a wrong formula is farther.
    decode: ids -> text, for the report. settings: of our Runner (`fused`, `chunk_size`), which must not change anything.
    While the greedy answers agree, their tokens' rows are compared as well.

    Raises PlanError for a plan with calibrated K/V, which transformers' modules cannot express; PromptError as the runner does.
    """
    config = model.config
    plan = PrefillPlan.full(config.num_layers) if plan is None else plan
    if plan.kv is not None:
        raise PlanError("compare has no reference for calibrated K/V projections: use a plan without them")
    if not len(inputs):
        raise PromptError("the prompt is empty")

    our_ids, ours = run_model(model, inputs, plan, max_new_tokens, **settings)
    reference_ids, theirs = run_reference(reference, config, inputs, plan, max_new_tokens)
    agree = next((i for i, (a, b) in enumerate(zip(our_ids, reference_ids)) if a != b), min(len(our_ids), len(reference_ids)))
    steps = min(agree + 1, len(ours["logits", None]), len(theirs["logits", None]))  # logits made from the same tokens
    rounding: Tensors | None = None
    if tolerance is None and reference.dtype in (torch.bfloat16, torch.float16):
        with _in_float32(reference):
            _, rounding = run_reference(reference, config, inputs, plan, max_new_tokens, forced=reference_ids[:steps])

    hidden = _pruned_tokens(plan, config, inputs) if not plan.project_kv else 0  # rows that some layers leave without K/V
    differences = []
    for name, layer in sorted(theirs, key=lambda key: (ORDER.index(key[0]), -1 if key[1] is None else key[1])):
        rows = slice(None)
        if name == "logits":
            rows = slice(steps)
        elif name in ("resid", "k", "v"):
            rows = slice(hidden if name != "resid" and layer in plan.skip else 0, len(inputs) + steps - 1)
        a, b = ours[name, layer][rows], theirs[name, layer][rows]
        if not b.numel():
            continue
        allowed = FLOAT32_TOLERANCE if tolerance is None else tolerance
        if rounding is not None:
            exact = _difference(name, layer, b, rounding[name, layer][rows], 0.0)
            allowed = ROUNDINGS * exact.relative + torch.finfo(reference.dtype).eps
        differences.append(_difference(name, layer, a, b, allowed))
    texts = (None, None) if decode is None else (decode(our_ids), decode(reference_ids))
    return Report(config.family, str(reference.dtype).removeprefix("torch."), plan.describe(), len(inputs), steps - 1,
                  tuple(differences), our_ids, reference_ids, *texts)


def _difference(name: str, layer: int | None, ours: Tensor, theirs: Tensor, allowed: float) -> LayerDifference:
    if ours.shape != theirs.shape:
        raise RuntimeError(f"{name} of layer {layer} is {list(ours.shape)} here and {list(theirs.shape)} in the reference")
    gap = (ours.double() - theirs.double()).abs()
    return LayerDifference(name, layer, float(gap.max()), float(gap.mean()), float(theirs.double().abs().max()), allowed)


def _greedy(first: Tensor, step: Callable[[int], Tensor], count: int, config: ModelConfig,
            forced: list[int] | None = None) -> tuple[list[int], Tensor]:
    """The same greedy loop for both sides: logits [vocab] -> up to `count` ids, and the logits that chose them [steps, vocab]."""
    ids: list[int] = []
    logits = [first.float().cpu()]
    while len(ids) < count:
        ids.append(int(logits[-1][: config.num_token_ids].argmax()) if forced is None else forced[len(ids)])
        if ids[-1] in config.eos_token_ids or len(ids) == count:
            break
        logits.append(step(ids[-1]).float().cpu())
    return ids, torch.stack(logits)


def _boundary_tokens(config: ModelConfig, inputs: ModelInputs) -> int:
    """The prompt's last token; in Gemma-3 all of an image at its end, whose tokens see each other."""
    count = 1
    if config.family == "gemma3" and inputs.pixel_values is not None:
        ids = inputs.token_ids.tolist()
        while count < len(ids) and ids[-count] == ids[-count - 1] == config.image_token_id:
            count += 1
    return count


def _pruned_tokens(plan: PrefillPlan, config: ModelConfig, inputs: ModelInputs) -> int:
    """How many of the prompt's tokens do without the skipped layers."""
    if not plan.skip:
        return 0
    return len(inputs) - (_boundary_tokens(config, inputs) if plan.split_boundary else 0)


# --- our side -----------------------------------------------------------------------------------------------------------------

def run_model(model: nn.Module, inputs: ModelInputs, plan: PrefillPlan, max_new_tokens: int,
              **settings) -> tuple[list[int], Tensors]:
    """minipop's greedy answer, and what its tap and cache show: `resid` [T, D], `k`, `v` [T, K, E], `logits` [steps, vocab]."""
    seen: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def tap(layer: int, name: str, tensor: Tensor) -> Tensor:
        if name == "resid":
            seen[name, layer].append(tensor[0].float().cpu())  # the parts of a prompt come in order
        elif name.startswith("vision"):
            seen[name, layer].append(tensor.float().cpu())
        return tensor

    runner = Runner(model, plan, max_seq_len=len(inputs) + max(max_new_tokens, 1) - 1, tap=tap, **settings)
    ids, logits = _greedy(runner.prefill(inputs)[0], lambda token: runner.decode([token])[0], max_new_tokens, model.config)
    if inputs.pixel_values is not None:
        weight = model.embedding.weight
        grid = () if inputs.image_grid_thw is None else (inputs.image_grid_thw,)
        with torch.no_grad():
            model.vision(inputs.pixel_values.to(weight.device, weight.dtype), *grid, tap=tap)
    tensors = {key: torch.cat(parts) for key, parts in seen.items()}
    for layer in range(model.config.num_layers):
        for name, store in (("k", runner.cache.keys), ("v", runner.cache.values)):
            tensors[name, layer] = store[layer, 0, :, : runner.cache.length].transpose(0, 1).float().cpu()
    tensors["logits", None] = logits
    return ids, tensors


# --- the reference's side -----------------------------------------------------------------------------------------------------

def transformers_module():
    """Import transformers, or say how to get it."""
    try:
        import transformers
    except ImportError as problem:
        if problem.name != "transformers":
            raise MinipopError(f"compare needs transformers, which cannot be imported: {problem}") from None
        raise MinipopError("compare needs transformers, which is not installed: pip install -e '.[test]' in the repository") from None
    return transformers


def load_reference(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> nn.Module:
    """transformers' model of a checkpoint folder, with plain attention. Raises CheckpointError if it cannot load it."""
    transformers = transformers_module()
    vision = "vision_config" in read_json(Path(folder) / "config.json")
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    try:
        model = auto.from_pretrained(str(folder), dtype=dtype, attn_implementation="eager",
                                     trust_remote_code=False, use_safetensors=True)
    except Exception as problem:  # whatever transformers and the libraries under it raise
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        raise CheckpointError(f"{folder}: transformers cannot load this checkpoint: {reason[0][:200]}") from None
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def run_reference(reference: nn.Module, config: ModelConfig, inputs: ModelInputs, plan: PrefillPlan, max_new_tokens: int,
                  forced: list[int] | None = None) -> tuple[list[int], Tensors]:
    """The reference's greedy answer under a plan, and what hooks on its modules show; see `run_model` for the shapes.

    config: ours, for end-of-text ids and the image token. forced: the answer is given, only its tensors are wanted.
    """
    cache = transformers_module().DynamicCache()  # without a config: sliding layers keep all their rows, their masks hide them
    base = reference.model
    text = getattr(base, "language_model", base)  # the stack of text layers
    cache_name = "cache" if "cache" in inspect.signature(type(text).forward).parameters else "past_key_values"
    if hasattr(base, "rope_deltas"):
        base.rope_deltas = None  # Qwen3-VL: what an earlier request left there would count for a text-only one
    pruned = _pruned_tokens(plan, config, inputs)
    if forced is not None:
        max_new_tokens = len(forced)

    def step(token: int) -> Tensor:
        ids = torch.tensor([[token]], device=reference.device)
        return reference(input_ids=ids, use_cache=True, **{cache_name: cache}).logits[0, -1]

    with ExitStack() as stack:
        seen = _watch(stack, base, text)
        stack.enter_context(_hidden_rows(text.layers, plan, pruned))
        with _two_passes(text, plan, pruned):
            prompt = _reference_inputs(config, inputs, reference.device, reference.dtype)
            first = reference(**prompt, use_cache=True, logits_to_keep=1, **{cache_name: cache}).logits[0, -1]
        ids, logits = _greedy(first, step, max_new_tokens, config, forced)
    tensors = {key: torch.cat(parts) for key, parts in seen.items()}
    for layer, rows in enumerate(cache.layers):
        tensors["k", layer], tensors["v", layer] = (t[0].transpose(0, 1).float().cpu() for t in (rows.keys, rows.values))
    tensors["logits", None] = logits
    return ids, tensors


def _reference_inputs(config: ModelConfig, inputs: ModelInputs, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """One prompt as transformers' forward takes it. Raises PromptError for the one kind of prompt it cannot take."""
    prompt = {"input_ids": inputs.token_ids[None]}
    if inputs.pixel_values is not None:
        image = (inputs.token_ids == config.image_token_id).long()  # [N], 1 where an image row goes
        prompt["pixel_values"] = inputs.pixel_values.to(dtype)
        prompt["token_type_ids" if config.family == "gemma3" else "mm_token_type_ids"] = image[None]
        if inputs.image_grid_thw is not None:
            prompt["image_grid_thw"] = inputs.image_grid_thw
            if int(image.diff(prepend=image.new_zeros(1)).eq(1).sum()) < len(inputs.image_grid_thw):
                raise PromptError("transformers takes Qwen3-VL images side by side for one: put a token between them to compare")
    return {name: tensor.to(device) for name, tensor in prompt.items()}


def _watch(stack: ExitStack, base: nn.Module, text: nn.Module) -> dict[tuple[str, int], list[Tensor]]:
    """Hook the reference's modules; what they see is collected under our tap's names until the stack closes."""
    seen: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def before(module: nn.Module, key: tuple[str, int]) -> None:
        """What goes into a module: the stream after the layer below it, DeepStack rows included."""
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            seen[key].append(x.flatten(0, -2).float().cpu())
        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(module: nn.Module, key: tuple[str, int]) -> None:
        def hook(_, __, output):
            output = output[0] if isinstance(output, tuple) else output
            seen[key].append(output.flatten(0, -2).float().cpu())
        stack.callback(module.register_forward_hook(hook).remove)

    for i, module in enumerate([*text.layers, text.norm]):
        before(module, ("resid", i - 1))
    visual = getattr(base, "visual", None)  # Qwen3-VL
    tower = getattr(base, "vision_tower", None)  # Gemma-3
    if visual is not None:
        blocks, out = visual.blocks, visual.merger
        for layer, merger in zip(visual.deepstack_visual_indexes, visual.deepstack_merger_list):
            after(merger, ("vision_deepstack", layer))
    elif tower is not None:
        blocks, out = getattr(tower, "vision_model", tower).encoder.layers, base.multi_modal_projector
    else:
        return seen
    before(blocks[0], ("vision_resid", -1))
    for i, block in enumerate(blocks):
        after(block, ("vision_resid", i))
    after(out, ("vision_out", len(blocks) - 1))
    return seen


@contextmanager
def _two_passes(text: nn.Module, plan: PrefillPlan, pruned: int) -> Iterator[None]:
    """Make the reference's text stack run a prompt as POP does: `pruned` tokens with layers skipped, then the rest with all.

    The stack is called with everything transformers prepared for the whole prompt, and each pass gets its part of that.
    """
    forward = text.forward

    def run(**prepared):
        if not pruned:
            return forward(**prepared)
        length = next(prepared[name].shape[1] for name in ("input_ids", "inputs_embeds") if prepared.get(name) is not None)
        with _replaced(text.layers, plan.skip, _kv_only):
            output = forward(**_part(prepared, slice(0, pruned)))
        if pruned < length:
            output = forward(**_part(prepared, slice(pruned, length)))
        return output

    text.forward = run
    try:
        yield
    finally:
        del text.forward  # the class's own shows again


def _kv_only(layer: nn.Module, forward: Callable, x: Tensor, **kwargs) -> Tensor:
    """A skipped layer: attention runs on the normed stream for the K/V rows it leaves in the cache; its output is thrown away."""
    layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    return x


@contextmanager
def _hidden_rows(layers: nn.ModuleList, plan: PrefillPlan, pruned: int) -> Iterator[None]:
    """For a plan without K/V in skipped layers: their rows are there (the cache counts them) but no later token sees them."""
    def forward_hiding(layer: nn.Module, forward: Callable, x: Tensor, **kwargs) -> Tensor:
        mask = kwargs["attention_mask"]  # [1, 1, N, T], added to the scores (or true = seen); None = one token that sees all
        mask = x.new_zeros(1, 1, x.shape[1], 1).expand(-1, -1, -1, pruned + 1) if mask is None else mask
        rows = torch.arange(mask.shape[-1], device=mask.device) < pruned
        shut = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return forward(x, **{**kwargs, "attention_mask": mask.masked_fill(rows, shut)})

    with _replaced(layers, () if plan.project_kv or not pruned else plan.skip, forward_hiding):
        yield


@contextmanager
def _replaced(layers: nn.ModuleList, which, function: Callable) -> Iterator[None]:
    """While it lasts, the layers `which` run function(layer, their forward, hidden_states, **kwargs)."""
    before = {i: (layers[i].__dict__.get("forward"), layers[i].forward) for i in which}
    for i, (_, forward) in before.items():
        layers[i].forward = partial(function, layers[i], forward)
    try:
        yield
    finally:
        for i, (own, _) in before.items():
            if own is None:
                del layers[i].forward
            else:
                layers[i].forward = own


def _part(prepared: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """The arguments of transformers' text stack for some of its prompt's tokens; those before them are in the cache by then."""
    part = dict(prepared)
    for name in ("input_ids", "inputs_embeds", "visual_pos_masks"):  # [1, N, ...]
        if part.get(name) is not None:
            part[name] = part[name][:, tokens]
    if part.get("position_ids") is not None:  # [..., N]
        part["position_ids"] = part["position_ids"][..., tokens]
    masks = part.get("attention_mask")  # [1, 1, N, N], or one for each kind of layer, or None: made by the stack
    if isinstance(masks, dict):
        part["attention_mask"] = {kind: None if m is None else m[:, :, tokens, : tokens.stop] for kind, m in masks.items()}
    elif masks is not None:
        part["attention_mask"] = masks[:, :, tokens, : tokens.stop]
    if part.get("deepstack_visual_embeds") is not None:  # each [R, D]
        image = prepared["visual_pos_masks"][0]
        rows = slice(int(image[: tokens.start].sum()), int(image[: tokens.stop].sum()))
        part["deepstack_visual_embeds"] = [embeds[rows] for embeds in part["deepstack_visual_embeds"]]
    return part


@contextmanager
def _in_float32(reference: nn.Module) -> Iterator[None]:
    """Widen the weights for a while; narrowing them again restores them bit by bit. Buffers (rotary tables) are float32."""
    dtypes = [p.dtype for p in reference.parameters()]
    for p in reference.parameters():
        p.data = p.data.float()
    try:
        yield
    finally:
        for p, dtype in zip(reference.parameters(), dtypes):
            p.data = p.data.to(dtype)


# --- tiny random pairs --------------------------------------------------------------------------------------------------------

def random_config(family: str, **overrides):
    """A tiny transformers config whose sizes all differ, so that a mistaken one cannot go unnoticed.

    family: one of FAMILIES. overrides: fields of the text config; `vision_config` is merged into the tower's, and `top` holds
    fields of a vision-language model's outer config.
    """
    transformers = transformers_module()
    top, vision = overrides.pop("top", {}), overrides.pop("vision_config", {})
    text = {"vocab_size": 99, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-2,  # so that it shows
            "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    if family == "llama":
        return transformers.LlamaConfig(**text | {"attention_bias": True, "mlp_bias": True} | overrides)
    if family == "mistral":
        return transformers.MistralConfig(**text | {"sliding_window": 5} | overrides)
    if family == "qwen2":
        return transformers.Qwen2Config(**text | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3,
                                                  "tie_word_embeddings": True} | overrides)
    if family == "qwen3":
        return transformers.Qwen3Config(**text | {"num_key_value_heads": 1, "attention_bias": True, "rope_theta": 1e6}
                                        | overrides)
    if family in ("gemma3", "gemma3_vl"):
        text |= {"sliding_window": 5, "sliding_window_pattern": 3,  # every third layer sees everything
                 "query_pre_attn_scalar": 24, "rope_parameters": {
                     "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
        if family == "gemma3":
            return transformers.Gemma3TextConfig(**text | overrides)
        # 6 x 6 patches pooled to 2 x 2 rows; the image id lies outside the vocabulary, as it does in some checkpoints
        vision = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 30,
                  "patch_size": 5, "layer_norm_eps": 1e-2, "vision_use_head": False} | vision
        return transformers.Gemma3Config(text_config=text | overrides, vision_config=vision, **{
            "mm_tokens_per_image": 4, "image_token_index": 99, "boi_token_index": 97, "eoi_token_index": 98} | top)
    if family == "qwen3_vl":
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]}}
        vision = {"hidden_size": 24, "intermediate_size": 36, "depth": 4, "num_heads": 3, "patch_size": 4, "out_hidden_size": 40,
                  "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]} | vision
        return transformers.Qwen3VLConfig(text_config=text | overrides, vision_config=vision, **{
            "image_token_id": 95, "video_token_id": 96, "vision_start_token_id": 97, "vision_end_token_id": 98} | top)
    raise MinipopError(f"there is no random pair of family {family!r}; choose one of {', '.join(FAMILIES)}")


def randomise(module: nn.Module, seed: int) -> None:
    """Weights with which nothing is neutral: matrices keep their input's scale, norms and biases are far from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for path, weight in module.named_parameters():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        gemma = type(owner).__name__.startswith("Gemma")
        if isinstance(owner, nn.Embedding):
            scale, shift = 0.3 * weight.shape[-1] ** -0.5 if gemma else 1.0, 0.0  # Gemma-3 multiplies by the root of the width
        elif weight.dim() > 1:  # [out, in, ...], but Gemma-3's projection of image rows is [in, out]
            scale, shift = 1.5 * (len(weight) if gemma else weight[0].numel()) ** -0.5, 0.0
        else:
            scale, shift = 0.3, 1.0 if name == "weight" and not gemma else 0.0  # Gemma-3 stores w - 1
        weight.data = (torch.randn(weight.shape, generator=generator) * scale + shift).to(weight.dtype)


def random_reference(family: str, seed: int = 0, **overrides) -> nn.Module:
    """transformers' model of a tiny random config, float32, with plain attention."""
    transformers = transformers_module()
    config = random_config(family, **overrides)
    auto = transformers.AutoModelForImageTextToText if family.endswith("_vl") else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval().requires_grad_(False)
    randomise(model, seed)
    return model


def random_pair(family: str, seed: int, folder: str | Path, **overrides) -> tuple[nn.Module, nn.Module]:
    """Save a tiny random checkpoint of a family into `folder`; returns (our model loaded from it, transformers' own)."""
    reference = random_reference(family, seed, **overrides)
    reference.save_pretrained(folder)
    return load_model(folder), reference


def random_inputs(config: ModelConfig, seed: int = 0, tokens: int = 23) -> ModelInputs:
    """Random ids, longer than the tiny windows; for a vision-language model with a random picture among them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, min(config.vocab_size, 90), (tokens,), generator=generator).tolist()
    vision = config.vision
    if vision is None:
        return ModelInputs(ids)
    if vision.kind == "siglip":
        shape, grid = (1, vision.in_channels, vision.image_size, vision.image_size), None
        rows = vision.tokens_per_image
    else:
        height, width = 2 * vision.spatial_merge_size, 3 * vision.spatial_merge_size
        shape = (height * width, vision.in_channels * vision.temporal_patch_size * vision.patch_size ** 2)
        grid, rows = torch.tensor([[1, height, width]]), 6
        ids[6] = config.vision_start_token_id  # older versions of transformers find images by it
    pixels = torch.rand(shape, generator=generator) * 2 - 1
    return ModelInputs(ids[:7] + [config.image_token_id] * rows + ids[7:], pixels, grid)


# --- the command line ---------------------------------------------------------------------------------------------------------

def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m minipop.compare", description="Compare minipop with transformers, layer by layer, on one "
                    "checkpoint and prompt.\nExit code 0: equal; 1: different; 2: the command or the checkpoint is at fault.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", metavar="PATH", help="a Hugging Face checkpoint folder, or org/model")
    source.add_argument("--random", metavar="FAMILY", choices=FAMILIES,
                        help=f"a tiny random model instead of a checkpoint: {', '.join(FAMILIES)}")
    add_plan_arguments(parser, default="skip nothing", calibrated=False)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and arithmetic (default: float32)")
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT)
    parser.add_argument("--image", metavar="FILE", nargs="+", default=[],
                        help="pictures before the text, for a vision-language model")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=20, help="longest answer (default: 20)")
    parser.add_argument("--tolerance", metavar="T", type=float,
                        help="largest difference, relative to a tensor's largest magnitude (default: 1e-4 in float32; in lower "
                             "precision, a multiple of the reference's own rounding)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="for --random")
    parser.add_argument("--json", metavar="FILE", help="also write the report here")
    return parser


def _inputs(args: argparse.Namespace, folder: Path) -> tuple[ModelInputs, Callable[[list[int]], str]]:
    """The prompt of the command line, and how to read an answer."""
    text = clean_text(args.prompt)
    if not args.image:
        tokenizer = load_tokenizer(folder)
        return ModelInputs(tokenizer.encode(text, add_bos=True)), tokenizer.decode
    processor = load_processor(folder)
    if processor.tokenizer.has_chat_template:
        parts = [{"type": "image", "image": file} for file in args.image] + [{"type": "text", "text": text}]
        return processor([{"role": "user", "content": parts}]), processor.tokenizer.decode
    prompt = f"{processor.image_processor.placeholder}\n" * len(args.image) + text
    return processor(prompt, args.image), processor.tokenizer.decode


def _compare(args: argparse.Namespace) -> Report:
    if args.max_new_tokens < 0:
        raise MinipopError(f"--max-new-tokens must be 0 or more, not {args.max_new_tokens}")
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        raise MinipopError(f"--tolerance must be a number from 0 on, not {args.tolerance}")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise MinipopError(f"--json {args.json}: there is no folder {Path(args.json).absolute().parent}")
    if args.random and args.image:
        raise MinipopError("--image needs --ckpt: a random vision-language model gets a random picture")
    check_device(args.device)
    transformers = transformers_module()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as temporary:
        decode = inputs = None
        if args.random:
            folder = Path(temporary)
            random_reference(args.random, args.seed).save_pretrained(folder)
        else:
            folder = resolve_checkpoint(args.ckpt)
            inputs, decode = _inputs(args, folder)
        model = load_model(folder, args.dtype, args.device)
        plan = plan_from(args, model.config.num_layers, ratio=0)
        reference = load_reference(folder, model.embedding.weight.dtype, args.device)
        inputs = random_inputs(model.config, args.seed) if inputs is None else inputs
        return compare(model, reference, inputs, plan, args.max_new_tokens, args.tolerance, decode)


def _command(args: argparse.Namespace) -> int:
    report = _compare(args)
    print(report)
    if args.json is not None:
        write_text(args.json, json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n")
    return 0 if report.passed else 1


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run(lambda: _command(_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
