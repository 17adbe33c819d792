"""What a forward costs on paper: floating-point operations and bytes. `bench` and `inspect` hold measurements against it.

A multiply-add counts as two operations. Norms, softmax and rotary embeddings are left out: they are a per cent or two.
"""

from .config import ModelConfig, VisionConfig
from .plan import PrefillPlan


def attended_rows(n: int, window: int | None, start: int = 0) -> int:
    """Sum over n causal tokens at columns start .. start + n - 1 of the rows each one sees."""
    growing = n if window is None else min(n, max(0, window - start))  # tokens whose window still reaches back to column 0
    full = growing * start + growing * (growing + 1) // 2
    return full if growing == n else full + (n - growing) * window


def layer_flops(config: ModelConfig, layer: int, n: int, start: int = 0) -> int:
    """A whole layer on n tokens."""
    matrices = sum(layer_parameters(config, layer).values())
    return 2 * n * matrices + 4 * config.queries_width * attended_rows(n, config.layer_windows[layer], start)  # scores and weighted sum


def layer_parameters(config: ModelConfig, layer: int) -> dict[str, int]:
    """Values in the matrices of a layer. `shortcuts`: those of a sliced model's residual connections (baselines/slicegpt.py)."""
    d, q, kv, mlp = config.stream_width, config.queries_width, config.kv_width, config.intermediate_size
    written = config.hidden_size if layer == config.num_layers - 1 else d  # a sliced model's last layer gives back the whole stream
    parts = {"attention": d * (q + 2 * kv) + q * d, "mlp": 2 * d * mlp + mlp * written}
    return parts if config.sliced_width is None else {**parts, "shortcuts": d * d + d * written}


def kv_flops(config: ModelConfig, n: int) -> int:
    """K and V alone, as a skipped layer computes them on n tokens."""
    return 2 * n * config.stream_width * 2 * config.kv_width


def prefill_flops(config: ModelConfig, n: int, plan: PrefillPlan) -> int:
    """A prompt of n tokens under a plan, the logits of its last token included."""
    pruned = n - 1 if plan.split_boundary else n
    total = 2 * config.hidden_size * config.vocab_size
    for layer in range(config.num_layers):
        if layer not in plan.skip:
            total += layer_flops(config, layer, n)
            continue
        total += kv_flops(config, pruned) if plan.project_kv else 0
        if plan.split_boundary:
            total += layer_flops(config, layer, 1, start=pruned if plan.project_kv else 0)
    return total


def step_flops(config: ModelConfig, rows: int) -> int:
    """A decode step of one sequence that has so many rows before it."""
    return sum(layer_flops(config, layer, 1, start=rows) for layer in range(config.num_layers)) + 2 * config.hidden_size * config.vocab_size


def vision_flops(vision: VisionConfig, patches: int, rows: int) -> int:
    """The vision tower on one picture of so many patches, which becomes so many rows of the prompt."""
    d, per_patch = vision.hidden_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    block = 2 * patches * (4 * d * d + 2 * d * vision.intermediate_size) + 4 * d * patches**2
    if vision.kind == "siglip":
        out = 2 * rows * d * vision.out_hidden_size
    else:  # a merger at the end, and one for each layer that DeepStack taps
        wide = d * vision.spatial_merge_size**2
        out = 2 * rows * wide * (wide + vision.out_hidden_size) * (1 + len(vision.deepstack_indexes))
    return 2 * patches * per_patch * d + vision.depth * block + out


def ideal_speedup(config: ModelConfig, n: int, plan: PrefillPlan) -> float:
    """Operations of the full prefill over those of the plan: the speed-up if time were proportional to operations."""
    return prefill_flops(config, n, PrefillPlan.full(config.num_layers)) / prefill_flops(config, n, plan)


def cache_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.kv_width * itemsize


def decoder_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of the text decoder by part; `head` is 0 when it is the embedding. Norms and biases are left out."""
    layers = [layer_parameters(config, layer) for layer in range(config.num_layers)]
    return {"embedding": config.vocab_size * config.stream_width, **{part: sum(layer[part] for layer in layers) for part in layers[0]},
            "head": 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size}


def decode_bytes(config: ModelConfig, rows: int, batch: int, itemsize: int) -> int:
    """Memory that one decode step must read: every matrix once, the head, and of each sequence's `rows` those in its windows."""
    parts = decoder_parameters(config)
    seen = sum(rows if window is None else min(rows, window) for window in config.layer_windows)
    weights = sum(parts.values()) - parts["embedding"] - parts["head"] + config.vocab_size * config.hidden_size
    return itemsize * (weights + batch * seen * 2 * config.kv_width)
