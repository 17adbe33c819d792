"""The decoder of Llama, Mistral, Qwen2/2.5 and Qwen3 text models. What differs between them is in `ModelConfig`:
biases, q/k norm, sliding windows, rotary frequencies. Gemma-3 and Qwen3-VL build on it in files of their own.

A model never loops over its layers: the runner does (see runner.py), and asks the model for the steps around the loop:

    inputs   = model.embed(batch)                     ids (and images) -> the residual stream
    position = model.positions(batch, starts)         where each token stands
    rope     = model.rope(positions)                  one rotary table a layer
    x        = model.after_layer(i, x, deepstack)     what a family adds between two layers
    logits   = model.logits(x)                        final norm and head, for the rows that need them

Shapes: B batch, N new tokens, D hidden, E head_dim, L layers.
"""

from dataclasses import dataclass
from typing import Iterable

import torch
from torch import Tensor, nn

from ..config import ModelConfig, RopeConfig
from ..errors import CheckpointError, PromptError
from ..inputs import Batch
from ..layers import DecoderLayer, RMSNorm, Rope, rope_frequencies, rope_table
from .names import Sources, expand, find_prefix

# Our parameter -> its name in the checkpoint, after the prefix. {i} counts the layers; several names are stacked in that order.
WEIGHTS = {
    "embedding.weight": "embed_tokens.weight",
    "norm.weight": "norm.weight",
    "layers.{i}.input_norm.weight": "layers.{i}.input_layernorm.weight",
    "layers.{i}.attn.qkv.weight": ("layers.{i}.self_attn.q_proj.weight", "layers.{i}.self_attn.k_proj.weight",
                                   "layers.{i}.self_attn.v_proj.weight"),
    "layers.{i}.attn.qkv.bias": ("layers.{i}.self_attn.q_proj.bias", "layers.{i}.self_attn.k_proj.bias",
                                 "layers.{i}.self_attn.v_proj.bias"),
    "layers.{i}.attn.q_norm.weight": "layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.attn.k_norm.weight": "layers.{i}.self_attn.k_norm.weight",
    "layers.{i}.attn.o.weight": "layers.{i}.self_attn.o_proj.weight",
    "layers.{i}.attn.o.bias": "layers.{i}.self_attn.o_proj.bias",
    "layers.{i}.mlp_norm.weight": "layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp.gate_up.weight": ("layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.up_proj.weight"),
    "layers.{i}.mlp.gate_up.bias": ("layers.{i}.mlp.gate_proj.bias", "layers.{i}.mlp.up_proj.bias"),
    "layers.{i}.mlp.down.weight": "layers.{i}.mlp.down_proj.weight",
    "layers.{i}.mlp.down.bias": "layers.{i}.mlp.down_proj.bias",
}
PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # spellings seen in published checkpoints
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass
class Embedded:
    """The stream before layer 0, x [B, N, D], and rows to add after the first layers (Qwen3-VL's DeepStack), each [B, N, D]."""

    x: Tensor
    deepstack: tuple[Tensor, ...] = ()


class Decoder(nn.Module):
    """Embedding, layers, final norm, head."""

    layer_class = DecoderLayer
    norm_class = RMSNorm
    deepstack_layers = 0  # how many of the first layers `after_layer` adds rows to
    compiled = None  # the way of one token that compiled.compile_decoding makes
    weights = WEIGHTS  # which entries apply (biases, k-norm) follows from the parameters a model has

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # Not nn.Embedding(V, D): its random start, on the meta device, would import PyTorch's compiler, which takes seconds.
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_layers))
        self.norm = self.norm_class(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    # --- the steps around the loop ---------------------------------------------------------------------------------

    def embed(self, batch: Batch) -> Embedded:
        """Token ids [B, N] -> the residual stream [B, N, D]."""
        return Embedded(self.embed_tokens(batch.token_ids))

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """[B, N] on any device -> [B, N, D]."""
        return self.embedding(token_ids.to(self.embedding.weight.device))

    def positions(self, batch: Batch, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Position of each token [B, N], and the next free one of each row [B]; starts [B] is the first. All on the CPU."""
        return starts[:, None] + torch.arange(batch.token_ids.shape[1]), starts + batch.counts

    def rope(self, positions: Tensor) -> list[Rope]:
        """The rotary table each layer uses; positions [B, N] -> L pairs of cos, sin [B, 1, N, E] (shared, not copied)."""
        table = self.rope_table(positions, self.config.rope)
        return [table] * self.config.num_layers

    def rope_table(self, positions: Tensor, rope: RopeConfig) -> Rope:
        weight = self.embedding.weight
        frequencies = rope_frequencies(rope, self.config.head_dim, weight.device)  # [E/2]
        angles = positions.to(weight.device)[..., None].float() * frequencies  # [B, N, E/2]
        return rope_table(angles, weight.dtype)

    def after_layer(self, index: int, x: Tensor, deepstack: tuple[Tensor, ...]) -> Tensor:
        """Called after every layer, run or skipped. Nothing to add here."""
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head. x [B, n, D] -> float32 [B, n, vocab]."""
        logits = self.head(self.norm(x)).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # --- images: nothing here, see gemma.py and qwen_vl.py ------------------------------------------------------------

    def image_counts(self, pixel_values: Tensor | None, image_grid_thw: Tensor | None) -> tuple[int, ...]:
        """Rows each image will take. Raises PromptError if the pixels cannot be this model's."""
        if pixel_values is not None or image_grid_thw is not None:
            raise PromptError("this model reads text only: the prompt holds an image")
        return ()

    def image_blocks(self, token_ids: Tensor) -> Tensor | None:
        """Blocks whose tokens see each other both ways: an id >= 0 a token, -1 for text, [B, N]; None = all causal."""
        return None

    # --- weights ------------------------------------------------------------------------------------------------------

    def sources(self, names: Iterable[str]) -> Sources:
        """Parameter name -> checkpoint tensors, for the spelling of prefixes that `names` (the checkpoint's) uses.

        Ties the head to the embedding where the checkpoint has no head of its own; call before the weights are loaded,
        and `tie` after.
        """
        names = set(names)
        prefix = find_prefix(names, PREFIXES, "embed_tokens.weight")
        wanted = expand(self.weights, prefix, i=self.config.num_layers)
        head = next((name for name in HEADS if name in names), None)
        if head is not None:
            wanted["head.weight"] = (head,)
        elif self.config.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        else:
            raise CheckpointError("the checkpoint has no lm_head.weight and its config does not tie it to the embedding")
        own = {name for name, _ in self.named_parameters()}
        return {ours: theirs for ours, theirs in wanted.items() if ours in own}

    def tie(self, sources: Sources) -> None:
        """After loading: a head without weights of its own is the embedding."""
        if "head.weight" not in sources:
            self.head.weight = self.embedding.weight
        elif self.config.tie_word_embeddings and torch.equal(self.head.weight, self.embedding.weight):
            self.head.weight = self.embedding.weight  # a redundant copy in the file; keep one
