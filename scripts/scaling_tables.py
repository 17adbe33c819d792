"""What prefill costs for models of 8, 70 and 405 billion parameters, with and without Prefill-Only Pruning (arXiv 2602.03295), on paper.

    python scripts/scaling_tables.py

prints the tables of docs/SCALING.md. Nothing is measured and no weights are needed: the shapes are those of the published config.json files
of Llama-3.1, the operations come from minipop/costs.py, and the weights that a process holds are counted on the models that minipop itself
builds for it, without storage. 16 bits a number; K and V of every layer; 1 GB = 10^9 bytes.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from minipop import PrefillPlan, costs  # noqa: E402
from minipop.config import ModelConfig, read_config  # noqa: E402
from minipop.models import build_model  # noqa: E402
from minipop.parallel import TensorPart  # noqa: E402
from minipop.shards import trim  # noqa: E402

SHAPES = {  # hidden_size, intermediate_size, num_hidden_layers, num_attention_heads; all: 8 kv heads of 128, 128,256 ids, untied
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
LENGTHS = {"2k": 2**11, "32k": 2**15, "128k": 2**17}
ITEMSIZE = 2
RATE = 400e12  # operations a second of one accelerator in matrix products; only its ratio to the link's rate matters


def llama(name: str) -> ModelConfig:
    """A Llama-3.1 config by its size."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False, **dict(zip(names, SHAPES[name]))}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return read_config(folder)


def weight_bytes(model: torch.nn.Module) -> int:
    return ITEMSIZE * sum(parameter.numel() for parameter in model.parameters())


def kv_bytes(config: ModelConfig, tokens: int, layers: int) -> int:
    return tokens * layers * costs.cache_bytes_per_token(config, ITEMSIZE) // config.num_layers


def gigabytes(n: float) -> str:
    return f"{n / 1e9:,.0f}" if n >= 1e11 else f"{n / 1e9:.1f}" if n >= 1e9 else f"{n / 1e9:.2f}"


def table(head: str, rows: list[list[str]]) -> str:
    """head: the columns, with | between them."""
    rule = "|" + "---|" * len(head.split("|"))
    return "\n".join([f"| {head} |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def prefill_rows(config: ModelConfig, name: str) -> list[list[str]]:
    """Operations, and what memory must at least give and take: every weight in use once, and K and V of the prompt once."""
    full, pop = PrefillPlan.full(config.num_layers), PrefillPlan.deepest(config.num_layers)
    embedding = ITEMSIZE * config.vocab_size * config.hidden_size  # only rows of it are read
    model = build_model(config)
    weights = weight_bytes(model) - embedding
    trim(model, pop)
    node = weight_bytes(model) - embedding
    # In one process the boundary token reads the skipped layers whole, after the rest of the prompt has read their W_K and W_V.
    fused = weights + len(pop.skip) * ITEMSIZE * config.hidden_size * 2 * config.kv_width
    rows = []
    for label, tokens in LENGTHS.items():
        flops = [costs.prefill_flops(config, tokens, plan) for plan in (full, pop)]
        kv = kv_bytes(config, tokens, config.num_layers)
        rows.append([name, label, *(f"{f / 1e12:,.0f}" for f in flops), f"{flops[0] / flops[1]:.2f}x",
                     *(gigabytes(read + kv) for read in (weights, fused, node)), gigabytes(kv)])
    return rows


def node_rows(config: ModelConfig, name: str) -> list[list[str]]:
    """Memory of a node that prefills one prompt at a time: the weights it holds, and K and V of the layers that run."""
    pop = PrefillPlan.deepest(config.num_layers)
    model = build_model(config)
    weights = weight_bytes(model)
    trim(model, pop)
    held = weight_bytes(model)
    rows = []
    for label, tokens in LENGTHS.items():
        kv, own = (kv_bytes(config, tokens, layers) for layers in (config.num_layers, pop.cut))
        rows.append([name, label, gigabytes(weights + kv), gigabytes(held + own), f"{(held + own) / (weights + kv):.0%}",
                     gigabytes(weights), gigabytes(held), f"{held / weights:.1%}"])
    return rows


def link_rows(config: ModelConfig, name: str) -> list[list[str]]:
    """K and V on their way to the decode node, and the link that is as fast as the computation."""
    pop = PrefillPlan.deepest(config.num_layers)
    rows = []
    for label, tokens in LENGTHS.items():
        sent, last = (kv_bytes(config, tokens - 1, layers) for layers in (config.num_layers, config.num_layers - pop.cut))
        seconds = [costs.prefill_flops(config, tokens, plan) / RATE for plan in (PrefillPlan.full(config.num_layers), pop)]
        rows.append([name, label, gigabytes(sent), gigabytes(last), *(f"{s:,.2f}" for s in seconds), *(f"{8 * sent / s / 1e9:,.1f}" for s in seconds)])
    return rows


def parallel_rows(config: ModelConfig, name: str) -> list[list[str]]:
    """A rank's share under --tp: weights, and K and V of a prompt of 128k tokens."""
    row = [name]
    for size in (1, 2, 4, 8, 16):
        share = TensorPart(0, size).config(config)
        head = ITEMSIZE * config.vocab_size * config.hidden_size
        row.append(f"{gigabytes(weight_bytes(build_model(share)) - head + head / size)} + "
                   f"{gigabytes(kv_bytes(share, LENGTHS['128k'], config.num_layers))}")
    return [row]


def tables() -> str:
    """All of them, in Markdown."""
    configs = {name: llama(name) for name in SHAPES}

    def all_rows(make) -> list[list[str]]:
        return [row for name, config in configs.items() for row in make(config, name)]

    plans = ", ".join(f"{len(PrefillPlan.deepest(c.num_layers).skip)} of {c.num_layers}" for c in configs.values())
    return "\n\n".join([
        f"Layers skipped: {plans}.",
        "**One prompt.** Operations, and the least that memory moves: each weight in use read once, K/V written once. In one process POP's "
        "boundary token\nreads the skipped layers all the same; apart, it does so on the decode node.",
        table("Llama-3.1 | tokens | full, TFLOP | POP, TFLOP | speed-up by operations | full, GB moved | POP, GB | POP, prefill node, GB | "
              "of these K/V, GB", all_rows(prefill_rows)),
        "**A prefill node.** Weights and the K/V of one prompt while it is encoded; with POP those of the layers that run.",
        table("Llama-3.1 | tokens | full, GB | POP, GB | POP over full | weights full, GB | weights POP, GB | share held", all_rows(node_rows)),
        "**From prefill to decode.** K/V sent, and the part of it that comes after the last layer has run; seconds of computation at "
        f"{RATE / 1e12:.0f} TFLOP/s;\nand the rate at which the link is as fast as that.",
        table("Llama-3.1 | tokens | sent, GB | last, GB | full, s | POP, s | full, Gbit/s | POP, Gbit/s", all_rows(link_rows)),
        "**Tensor parallelism.** A rank's weights + K/V of 128k tokens, GB.",
        table("Llama-3.1 | 1 rank | --tp 2 | --tp 4 | --tp 8 | --tp 16", all_rows(parallel_rows)),
    ])


if __name__ == "__main__":
    print(tables())
