"""docs/SCALING.md says what its script says, and what the script says is right for one model, by hand."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("scaling_tables", ROOT / "scripts" / "scaling_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables(script):
    return script.tables()


def test_the_page_holds_the_scripts_output(tables):
    page = (ROOT / "docs" / "SCALING.md").read_text()
    assert page.split("<!-- scaling tables -->\n")[1].split("<!-- end of scaling tables -->")[0] == tables + "\n"


def test_llama_8b_by_hand(tables):
    lines = tables.splitlines()
    one, node, link = (line.strip("| ").split(" | ") for line in lines if line.startswith("| 8B | 128k"))
    tokens, layer, kv_rows, head = 2**17, 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336, 2 * 4096 * 1024, 4096 * 128256
    attention = 2 * 4096 * tokens * (tokens + 1)  # q k^T and the weighted sum of v, over every pair in sight
    full = 32 * (2 * tokens * layer + attention) + 2 * head
    pop = 22 * (2 * tokens * layer + attention) + 10 * (2 * (tokens - 1) * kv_rows + 2 * layer + 4 * 4096 * tokens) + 2 * head
    assert one[2:5] == [f"{full / 1e12:,.0f}", f"{pop / 1e12:,.0f}", f"{full / pop:.2f}x"]
    norms = 2 * 4096
    weights, kv = 2 * (32 * (layer + norms) + head + 4096), 32 * 2 * 1024 * 2 * tokens  # read, without the embedding's rows
    assert one[5:] == [f"{(weights + kv) / 1e9:.1f}", f"{(weights + 10 * 2 * kv_rows + kv) / 1e9:.1f}",
                       f"{(2 * (22 * (layer + norms) + 10 * (kv_rows + 4096)) + kv) / 1e9:.1f}", f"{kv / 1e9:.1f}"]
    held = 2 * (head + 22 * (layer + norms) + 10 * (kv_rows + 4096))
    assert node[2:4] == [f"{(weights + 2 * head + kv) / 1e9:.1f}", f"{(held + kv * 22 // 32) / 1e9:.1f}"]
    sent = kv * (tokens - 1) / tokens
    assert link[2:4] == [f"{sent / 1e9:.1f}", f"{sent * 10 / 32 / 1e9:.1f}"]
    assert link[6:] == [f"{8 * sent / (work / 400e12) / 1e9:,.1f}" for work in (full, pop)]
    shares = next(line for line in lines if line.startswith("| 8B | 16")).strip("| ").split(" | ")
    assert shares[2] == f"{(2 * (head + head / 2 + 16 * layer + 32 * norms + 4096)) / 1e9:.1f} + {kv / 2 / 1e9:.1f}"  # 2 ranks
    assert shares[5].endswith(f"+ {kv / 8 / 1e9:.1f}")  # 16 ranks share 8 kv heads


def test_shapes_are_the_published_ones(script):
    """Parameters as the model cards count them: 8.03, 70.6 and 405.9 billion."""
    sizes = [script.weight_bytes(script.build_model(script.llama(name))) / 2e9 for name in script.SHAPES]
    assert [round(size, 1) for size in sizes] == [8.0, 70.6, 405.9]
