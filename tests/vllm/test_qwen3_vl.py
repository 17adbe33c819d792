"""Qwen3-VL in vLLM under POP: pictures, three-axis positions, DeepStack; the committed tiny model, in float32.

vLLM's Qwen3-VL imports torchvision. scripts/setup_vllm.sh puts one aside, in a folder that only these tests look into.
"""

import pytest
from PIL import Image

import minipop
from minipop import PrefillPlan, Runner
from minipop.processing import load_processor

from .common import NEEDS_VLLM, ROOT, TORCHVISION, check_same, engine, random_prompts, runner_answer

MODEL = ROOT / "weights" / "tiny-qwen3-vl"
QUESTIONS = ["What is left of the yellow diamond?", "How many shapes are there?", "What color is the circle?"]
pytestmark = [*NEEDS_VLLM, pytest.mark.skipif(not TORCHVISION.is_dir(), reason="no torchvision beside vLLM (scripts/setup_vllm.sh)")]


def collapse(ids: list[int], image_token_id: int) -> list[int]:
    """Each image's run of placeholders as one, which vLLM expands itself."""
    return [token for i, token in enumerate(ids) if token != image_token_id or ids[i - 1] != token]


def test_pictures_and_text(tmp_path, run_engine_with_torchvision):
    """Three questions about a picture and some text prompts at once, in chunks that end inside the picture, twice."""
    picture = tmp_path / "shapes.png"  # in the size the model wants: vLLM's image processor would shrink it a little differently
    Image.open(ROOT / "examples" / "shapes.png").convert("RGB").resize((96, 96)).save(picture)
    processor, model = load_processor(MODEL), minipop.load_model(MODEL, dtype="float32")
    messages = [[{"role": "user", "content": [{"type": "image", "image": str(picture)}, {"type": "text", "text": text}]}] for text in QUESTIONS]
    inputs = [processor(message) for message in messages]
    pictures = [{"ids": collapse(i.token_ids.tolist(), model.config.image_token_id), "image": str(picture)} for i in inputs]
    texts = random_prompts([5, 40, 21], seed=1)
    rounds = [pictures + texts] * 2
    arguments = engine(MODEL, {"skip": "5-7"}, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1, "video": 0}, max_num_batched_tokens=48)
    result = run_engine_with_torchvision(arguments, rounds, max_tokens=6, sampling={"logprobs": 0})
    runner = Runner(model, PrefillPlan(8, {5, 6, 7}), max_seq_len=256)
    check_same(result, runner, [inputs + texts] * 2, max_tokens=6)
    full = Runner(model, max_seq_len=256)
    assert any(runner_answer(full, i, 6)[1] != runner_answer(runner, i, 6)[1] for i in inputs)


def test_layers_that_take_image_features_must_run(run_engine_with_torchvision):
    arguments = engine(MODEL, {"skip": "1-7"}, skip_tokenizer_init=False)
    assert "image features enter after each of them" in run_engine_with_torchvision(arguments, [])["error"]
