"""The pictures, questions and tokenizer behind the tiny Qwen3-VL, and its training forward against the reference."""
import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pictures need its fonts")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from tiny_vl import batches, scenes, vocab  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return vocab.train_tokenizer()


def test_heldout_questions_repeat_for_a_seed_and_differ_between_seeds():
    first, again, other = (scenes.heldout_questions(12, seed) for seed in (3, 3, 4))
    assert [(k, q, a, p.tobytes()) for k, p, q, a in first] == [(k, q, a, p.tobytes()) for k, p, q, a in again]
    assert [q for _, _, q, _ in first] != [q for _, _, q, _ in other]
    assert [k for k, *_ in first] == list(scenes.HELDOUT_KINDS) * 3
    assert all(p.mode == "RGB" and p.size in scenes.SIZES for _, p, _, _ in first)


def test_training_scenes_hold_nothing_held_out():
    rng = random.Random(0)
    seen_pairs, seen_texts = set(), set()
    for i in range(1500):
        scene = scenes.make_scene(rng, text=i % 2 == 0, size=rng.choice(scenes.SIZES))
        seen_pairs |= {(item.colour, item.shape) for item in scene.shapes}
        seen_texts |= {item.text for item in scene.texts}
    assert seen_pairs == set(scenes.TRAIN_PAIRS)
    assert not seen_texts & scenes.HELDOUT_WORDS
    assert not any(scenes.is_heldout_number(text) for text in seen_texts if text.isdigit())


def test_heldout_questions_depend_on_something_held_out():
    for scene, asked in scenes.heldout_scenes(60, seed=5):
        if asked.kind == "read":
            assert asked.answer in scenes.HELDOUT_WORDS or scenes.is_heldout_number(asked.answer)
        else:
            assert any((item.colour, item.shape) in scenes.HELDOUT_PAIRS for item in asked.about)


def test_count_answers_count_the_drawn_shapes():
    rng, checked = random.Random(2), 0
    while checked < 60:
        scene = scenes.make_scene(rng, text=False)
        asked = scenes.ask_count(rng, scene)
        if asked is None:
            continue
        words = asked.question.replace("?", "").replace(".", "").split()
        colours = [w for w in words if w in scenes.COLOURS]
        shapes = [s for s in scenes.SHAPES if s in words or scenes._plural(s) in words]
        expected = [o for o in scene.shapes if o.colour in (colours or scenes.COLOURS) and o.shape in (shapes or scenes.SHAPES)]
        assert asked.answer == str(len(expected)), asked.question
        checked += 1


def test_yes_and_no_follow_from_the_centres():
    rng, seen = random.Random(4), set()
    for _ in range(400):
        scene = scenes.make_scene(rng, text=False)
        asked = scenes.ask_relation(rng, scene)
        if asked is None or asked.answer not in ("yes", "no"):
            continue
        x, y = asked.about
        axis, sign = scenes._DIRECTIONS[next(d for d in scenes._DIRECTIONS if d in asked.question)]
        gap = sign * ((x.cx, x.cy)[axis] - (y.cx, y.cy)[axis])
        assert (asked.answer == "yes") == (gap > 0) and abs(gap) >= scenes.MARGIN
        seen.add(asked.answer)
    assert seen == {"yes", "no"}


def test_a_shape_is_drawn_in_its_colour_at_its_place():
    rng = random.Random(6)
    for _ in range(20):
        scene = scenes.make_scene(rng, text=False)
        small, large = scenes.render(scene), scenes.render(scene, scale=3)
        assert small.size == (scene.width, scene.height) and large.size == (3 * scene.width, 3 * scene.height)
        for item in scene.shapes:
            for picture, scale in ((small, 1), (large, 3)):
                pixel = picture.getpixel((int(item.cx * scale), int(item.cy * scale)))
                assert max(abs(a - b) for a, b in zip(pixel, item.rgb)) <= 2


def test_texts_stay_inside_the_picture_in_every_font():
    rng, fonts = random.Random(7), set()
    for _ in range(200):
        scene = scenes.make_scene(rng, text=True, size=rng.choice(scenes.SIZES))
        for item in scene.texts:
            fonts.add(item.font)
            x0, y0, x1, y1 = scenes.load_font(item.font, item.points).getbbox(item.text)
            assert item.cx - (x1 - x0) / 2 >= 0 and item.cx + (x1 - x0) / 2 <= scene.width
            assert item.cy - (y1 - y0) / 2 >= 0 and item.cy + (y1 - y0) / 2 <= scene.height
    assert fonts == set(range(scenes.NUM_FONTS))


def test_patch_labels_name_what_lies_at_each_patch():
    rng = random.Random(8)
    for i in range(20):
        scene = scenes.make_scene(rng, text=i % 2 == 0)
        thing, colour = scenes.patch_labels(scene, 8)
        assert thing.shape == colour.shape == (scene.height // 8, scene.width // 8)
        assert ((thing == 0) == (colour == 0)).all() and (thing == 0).any()
        for item in scene.shapes:
            row, column = int(item.cy // 8), int(item.cx // 8)
            assert scenes.THINGS[thing[row, column]] == item.shape
            assert scenes.PATCH_COLOURS[colour[row, column]] == item.colour
        for item in scene.texts:
            row = [scenes.THINGS[t] for t in thing[int(item.cy // 8)]]
            spelt = [c for c in row if c and c in item.text]
            places = [item.text.find(c) for c in spelt]
            assert spelt and (len(set(item.text)) < len(item.text) or places == sorted(places))
    order = batches.in_merge_order(thing)
    assert order[:4].tolist() == [thing[0, 0], thing[0, 1], thing[1, 0], thing[1, 1]]


def test_tokenizer_round_trips_any_text_and_never_merges_what_is_read(tokenizer):
    for text in ("What colour is the red circle?", "TREE", "4071", "naïve 世界 \n\t 🙂", "", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    for text in ("TREE", "4071", "QUILT"):
        assert tokenizer.encode(text).tokens == list(text)
    assert len(tokenizer.encode("How many red circles are there?").ids) <= 8


def test_tokenizer_is_the_same_every_time_and_its_specials_are_single_ids(tokenizer):
    assert vocab.train_tokenizer().to_str() == tokenizer.to_str()
    ids = [tokenizer.encode(token).ids for token in vocab.SPECIALS]
    assert all(len(one) == 1 for one in ids) and len({one[0] for one in ids}) == len(vocab.SPECIALS)


def test_chat_template_renders_text_and_images(tokenizer, tmp_path):
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    vocab.save_tokenizer(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": "red"}, {"role": "user", "content": "Why?"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\nred<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("chat", (False, True))
def test_a_packed_sequence_spells_the_prompts_it_stands_for(tokenizer, chat):
    encoder, rng = batches.Encoder(tokenizer), random.Random(9)
    questions = []
    while len(questions) < 3:
        scene = scenes.make_scene(rng, text=False)
        asked = scenes.ask(rng, scene)
        if asked and asked.kind != "describe":
            questions.append(asked)
    ids, labels, weights, positions, segments, named = batches.pack(encoder, 96, 80, questions, 128, chat)
    assert len(ids) == len(labels) == len(segments) == positions.shape[1] == 128
    head = "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 30 + "<|vision_end|>"
    turns = [f"{q.question}<|im_end|>\n<|im_start|>assistant\n{q.answer}<|im_end|>" for q in questions]
    if chat:
        expected = tokenizer.encode(head + "\n<|im_start|>user\n".join(turns)).ids
        assert ids[:len(expected)] == expected
    else:       # apart: prefix and question k together are the one-question prompt, at the positions it would have
        for k, turn in enumerate(turns, 1):
            rows = [i for i in range(128) if segments[i] in (0, k)]
            assert [ids[i] for i in rows] == tokenizer.encode(head + turn).ids
            assert positions[0, rows[-1]] == positions[0, len(encoder.head)] + 6 + len(rows) - 30 - 4 - 1
    answers = [tokenizer.encode(q.answer + "<|im_end|>").ids for q in questions]
    for row, right, down in named:
        assert tokenizer.decode([ids[row]]).strip() in scenes.SHAPES + ("shape",) and abs(right) < 1 and abs(down) < 1
    assert len(named) == sum(len(q.named) for q in questions)
    assert sum(weights) == pytest.approx(3) and all((w > 0) == (label != -100) for w, label in zip(weights, labels))
    assert [x for x in labels if x != -100] == [x for a in answers for x in a]
    assert all(label in (-100, following) for label, following in zip(labels, ids[1:]))


def test_training_forward_equals_the_reference(tokenizer, monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import train_tiny_vl
    from tiny_vl import fast
    monkeypatch.setattr(fast, "MATMUL_DTYPE", torch.float32)
    config = train_tiny_vl.make_config(tokenizer)
    config.text_config.num_hidden_layers = 3
    model = train_tiny_vl.make_model(config, seed=0).eval()
    questions = [q for q in scenes.heldout_questions(8, seed=1, kinds=("read",)) if q[1].size != (96, 96)][:2]
    assert questions
    for _, batch in batches.question_batches(tokenizer, questions):
        mask = batches.attention_mask(batch["segments"])
        forward = fast.FastForward(model)
        with torch.no_grad():
            hidden, *_ = forward.hidden(batch["images"], batch["ids"], batch["positions"], mask)
            ours = forward.logits(hidden)
            pixels = fast.patches(batch["images"], batches.PATCH)
            B, P, _ = pixels.shape
            pixels = pixels.view(B * P, 3, 1, batches.PATCH ** 2).expand(-1, -1, 2, -1).reshape(B * P, -1)
            _, height, width, _ = batch["images"].shape
            real = batch["segments"] != -1
            reference = model(input_ids=batch["ids"], pixel_values=pixels, attention_mask=real.long(),
                              image_grid_thw=torch.tensor([[1, height // batches.PATCH, width // batches.PATCH]] * B),
                              mm_token_type_ids=(batch["ids"] == config.image_token_id).int()).logits
        torch.testing.assert_close(ours[real], reference[real], rtol=1e-5, atol=1e-5 * reference.abs().max().item())
