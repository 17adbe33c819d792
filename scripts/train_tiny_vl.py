"""Trains the small Qwen3-VL that comes with minipop, from scratch on a CPU, on pictures that `tiny_vl/scenes.py` draws.

    python scripts/train_tiny_vl.py                        train (or go on after a stop), then write weights/tiny-qwen3-vl
    python scripts/train_tiny_vl.py --eval                 accuracy of the saved model by kind of question, with transformers
    python scripts/train_tiny_vl.py --eval-set DIR         write the held-out questions as pictures and questions.jsonl

Needs torch, transformers, tokenizers, safetensors, pillow, and matplotlib for its fonts.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiny_vl import batches, scenes, vocab                                    # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
EXTRA_KINDS = ("shape", "size", "where", "describe")
EVAL_SEED = 2026


# ------------------------------------------------------------------------------------------------- the model

def make_config(tokenizer):
    """A Qwen3-VL of 8 text layers and 4 vision blocks, small enough for 8 MB of bfloat16."""
    from transformers import Qwen3VLConfig

    token = tokenizer.token_to_id
    end = [token("<|im_end|>"), token("<|endoftext|>")]
    return Qwen3VLConfig(
        text_config={"vocab_size": -(-tokenizer.get_vocab_size() // 8) * 8, "hidden_size": 128, "intermediate_size": 384,
                     "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                     "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": True,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
                                         "mrope_interleaved": True},
                     "eos_token_id": end, "pad_token_id": None, "dtype": "bfloat16"},
        vision_config={"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "patch_size": batches.PATCH,
                       "spatial_merge_size": batches.MERGE, "temporal_patch_size": 2, "out_hidden_size": 128,
                       "num_position_embeddings": 144, "deepstack_visual_indexes": [1, 2], "in_channels": 3, "dtype": "bfloat16"},
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True, eos_token_id=end, dtype="bfloat16",
        architectures=["Qwen3VLForConditionalGeneration"])


def make_model(config, seed: int):
    """Freshly initialised, float32."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    return model.train()


def save_folder(model, tokenizer, folder: Path) -> None:
    """The Hugging Face folder: bfloat16 weights, config, tokenizer, processor. Complete or not there at all, file by file."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters() if n != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors.tmp", 0o644)
    os.replace(folder / "model.safetensors.tmp", folder / "model.safetensors")
    make_config(tokenizer).save_pretrained(folder)           # a fresh one: building a model writes its float32 into the config
    vocab.save_tokenizer(tokenizer, folder)
    end = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": end[1]})
    least, greatest = scenes.IMAGE_AREA
    write_json(folder / "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": batches.PATCH,
        "temporal_patch_size": 2, "merge_size": batches.MERGE, "size": {"shortest_edge": least, "longest_edge": greatest},
        "do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "do_convert_rgb": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})


def write_json(path: Path, value) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


# ------------------------------------------------------------------------------------------------- training

def rate(progress: float, step: int, warmup: int = 60) -> float:
    """Factor on the learning rates: a short rise, 1 while the model finds out how to see, 0.45, and to 0 over the last fifth."""
    if progress < 0.37:
        return min(1.0, (step + 1) / warmup)
    return 0.45 * min(1.0, (1.0 - progress) / 0.2)


def make_heads(width: int, text_width: int):
    """Linear read-outs for training only: of each patch the thing, the colour and the place; halfway through the text layers, the
    place of what a question names."""
    import torch
    heads = torch.nn.ModuleDict({"thing": torch.nn.Linear(width, len(scenes.THINGS)),
                                 "colour": torch.nn.Linear(width, len(scenes.PATCH_COLOURS)),
                                 "place": torch.nn.Linear(width, 2), "named": torch.nn.Linear(text_width, 2)})
    for head in heads.values():
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
    return heads


def patch_loss(heads, seen, labels, places):
    """Cross-entropy of what lies at each patch (background, by far the most, counts a tenth) and squared error of its place."""
    import torch
    import torch.nn.functional as F
    total = F.mse_loss(heads["place"](seen), places.expand(seen.shape[0], -1, -1))
    for head, target in zip((heads["thing"], heads["colour"]), labels):
        weight = torch.ones(head.out_features)
        weight[0] = 0.1
        total = total + F.cross_entropy(head(seen).flatten(0, 1), target.flatten(), weight)
    return total


def loss_of(fast, heads, batch, look_only: bool):
    """Answer loss plus those of the training heads; at the beginning the vision tower alone learns to see (`look_only`).

    Without the heads the same is learnt, much later: they say where to look, the answers only whether the outcome was right.
    """
    import torch
    import torch.nn.functional as F
    if look_only:
        return patch_loss(heads, fast.vision(batch["images"])[2], batch["patch_labels"], batch["patch_places"])
    mask = batches.attention_mask(batch["segments"])
    hidden, halfway, seen = fast.hidden(batch["images"], batch["ids"], batch["positions"], mask)
    answer = batch["labels"] != -100
    losses = F.cross_entropy(fast.logits(hidden[answer]), batch["labels"][answer], reduction="none")
    weights = batch["weights"][answer]
    looking = patch_loss(heads, seen, batch["patch_labels"], batch["patch_places"])
    sequence, row, *place = batch["named"].unbind(1)
    finding = F.mse_loss(heads["named"](halfway[sequence.long(), row.long()]), torch.stack(place, 1))
    return (losses * weights).sum() / weights.sum() + 0.2 * looking + finding


def quick_scores(fast, tokenizer, questions) -> dict:
    """Share of the questions per kind whose whole answer is the greedy one: each token is the argmax after the ones before it."""
    import torch
    right = {}
    with torch.no_grad():
        for chosen, batch in batches.question_batches(tokenizer, questions):
            hidden, *_ = fast.hidden(batch["images"], batch["ids"], batch["positions"], batches.attention_mask(batch["segments"]))
            hit = (fast.logits(hidden).argmax(-1) == batch["labels"]) | (batch["labels"] == -100)
            for i, ok in zip(chosen, hit.all(1).tolist()):
                right.setdefault(questions[i][0], []).append(ok)
    return {kind: round(sum(v) / len(v), 3) for kind, v in right.items()}


def train(args) -> None:
    """Starts the other processes and takes part as rank 0. One thread each: a small model's products are too short to share."""
    import torch.multiprocessing as mp

    args.work.mkdir(parents=True, exist_ok=True)
    args.rendezvous = str(args.work / f"rendezvous-{os.getpid()}")
    context = mp.get_context("spawn")
    others = [context.Process(target=train_rank, args=(rank, args), daemon=True) for rank in range(1, args.processes)]
    for process in others:
        process.start()
    train_rank(0, args)
    for process in others:
        process.join()
    Path(args.rendezvous).unlink(missing_ok=True)


def train_rank(rank: int, args) -> None:
    """One of `args.processes` equal copies of the model, each with its own pictures; gradients are averaged every step."""
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from safetensors.torch import save_file
    from tiny_vl.fast import FastForward
    from tiny_vl.optim import MuonAdamW

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=args.processes)
    say = (lambda *words: print(*words, flush=True)) if rank == 0 else (lambda *words: None)
    tokenizer = vocab.train_tokenizer()
    model = make_model(make_config(tokenizer), args.seed)
    heads = make_heads(model.config.vision_config.hidden_size, model.config.text_config.hidden_size)
    parameters = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
    say(f"{sum(p.numel() for _, p in parameters):,} parameters, vocabulary {tokenizer.get_vocab_size()}")
    parameters += [(f"heads.{n}", p) for n, p in heads.named_parameters()]
    fast, optimizer = FastForward(model), MuonAdamW(parameters, args.muon_lr, args.adam_lr, rank=rank, ranks=args.processes)
    checkpoint = args.work / "checkpoint.safetensors"
    done = {"step": 0, "wall": 0.0, "cpu": 0.0}
    if checkpoint.exists():
        with safe_open(checkpoint, "pt") as f:
            done = json.loads(f.metadata()["done"])
            state = {name: f.get_tensor(name) for name in f.keys()}
        with torch.no_grad():
            for name, p in parameters:
                p.copy_(state[f"model.{name}"])
        optimizer.load_state_tensors({k[4:]: v for k, v in state.items() if k.startswith("opt.")})
        say(f"going on at step {done['step']} after {done['wall'] / 60:.1f} minutes")
    elif rank == 0 and not args.smoke:
        save_folder(model, tokenizer, args.out)          # so that the folder's form can be looked at from the start

    def save_checkpoint():
        tensors = {f"model.{n}": p.detach() for n, p in parameters}
        tensors |= {f"opt.{k}": v for k, v in optimizer.state_tensors().items()}
        save_file(tensors, checkpoint.with_suffix(".tmp"), metadata={"done": json.dumps(done)})
        os.replace(checkpoint.with_suffix(".tmp"), checkpoint)

    questions = [] if rank else scenes.heldout_questions(320, seed=1) + scenes.heldout_questions(80, seed=1, kinds=EXTRA_KINDS)
    data = batches.TrainingBatches(tokenizer, args.batch // args.processes, args.seed, args.processes, args.easy_steps)
    start_wall, start_cpu, before = time.time(), time.process_time(), dict(done)
    last_save = last_eval = last_line = time.time()
    losses, budget = [], args.minutes * 60
    while (progress := max(done["cpu"] / args.processes / budget, done["wall"] / 60 / args.wall_minutes)) < 1:
        # The budget counts CPU time, so that a machine shared with others trains for as many steps as an idle one.
        loss = loss_of(fast, heads, data[done["step"] * args.processes + rank], done["step"] < args.look_steps)
        loss.backward()
        for _, p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for _, p in parameters]
                         + [torch.tensor([loss.item(), time.process_time() - start_cpu, time.time() - start_wall])])
        dist.all_reduce(flat)
        flat /= args.processes
        offset = 0
        for _, p in parameters:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
            offset += p.numel()
        mean_loss, cpu, wall = flat[-3:].tolist()         # equal in all processes, so all of them stop at the same step
        optimizer.step(rate(progress, done["step"]))
        now = time.time()
        done = {"step": done["step"] + 1, "wall": before["wall"] + wall, "cpu": before["cpu"] + cpu * args.processes}
        losses.append(mean_loss)
        if rank:
            continue
        if now - last_line > 20:
            say(f"step {done['step']:6d}  loss {sum(losses) / len(losses):.4f}  {done['wall'] / 60:5.1f} min wall  "
                f"{done['cpu'] / 60:6.1f} min cpu  {100 * progress:4.1f}%  "
                f"{(now - start_wall) / (done['step'] - before['step']):.3f} s/step")
            losses, last_line = [], now
        if now - last_eval > args.eval_every:
            say("        held out", json.dumps(quick_scores(fast, tokenizer, questions)))
            last_eval = time.time()
        if now - last_save > 180:
            save_checkpoint()
            last_save = time.time()
    if rank == 0:
        save_checkpoint()
        say("        held out", json.dumps(quick_scores(fast, tokenizer, questions)))
        if not args.smoke:
            save_folder(model, tokenizer, args.out)
            say(f"{args.out}: {sum(p.stat().st_size for p in args.out.iterdir()):,} bytes; {done['step']} steps, "
                f"{done['wall'] / 60:.1f} min wall, {done['cpu'] / 60:.1f} min cpu")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------- evaluation

def evaluation_questions() -> list:
    """1,000 held-out questions about colour, count and relation, 500 that ask to read, 200 of the other kinds."""
    return (scenes.heldout_questions(1000, EVAL_SEED, ("colour", "count", "relation"))
            + scenes.heldout_questions(500, EVAL_SEED, ("read",))
            + scenes.heldout_questions(200, EVAL_SEED, EXTRA_KINDS))


def answers(folder: Path, questions: list, dtype: str, batch_size: int = 32) -> list[str]:
    """Greedy answers of the saved model, run by transformers. Prompts of one length and size share a batch: no padding."""
    import torch
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    groups = {}
    for i, (_, picture, question, _) in enumerate(questions):
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        seen = processor(picture, return_tensors="pt")
        rows = int(seen["image_grid_thw"].prod()) // processor.merge_size ** 2
        ids = tokenizer.encode(prompt.replace("<|image_pad|>", "<|image_pad|>" * rows), add_special_tokens=False)
        groups.setdefault((len(ids), picture.size), []).append((i, ids, seen))
    found = [""] * len(questions)
    for members in groups.values():
        for start in range(0, len(members), batch_size):
            part = members[start:start + batch_size]
            ids = torch.tensor([m[1] for m in part])
            with torch.no_grad():
                out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48,
                                     pixel_values=torch.cat([m[2]["pixel_values"] for m in part]).to(model.dtype),
                                     image_grid_thw=torch.cat([m[2]["image_grid_thw"] for m in part]),
                                     mm_token_type_ids=(ids == model.config.image_token_id).int())
            for m, text in zip(part, tokenizer.batch_decode(out[:, ids.shape[1]:], skip_special_tokens=True)):
                found[m[0]] = text.strip()
    return found


def evaluate(args) -> None:
    import torch
    torch.set_num_threads(args.processes)
    questions = evaluation_questions()
    found = answers(args.out, questions, args.dtype)
    right = {}
    for (kind, _, _, answer), said in zip(questions, found):
        right.setdefault(kind, []).append(said == answer)
    report = {"model": args.out.name, "dtype": args.dtype, "seed": EVAL_SEED,
              "held_out": "each colour, count, relation and read question depends on a combination never trained on",
              "accuracy": {k: {"right": sum(v), "of": len(v), "share": round(sum(v) / len(v), 4)} for k, v in right.items()}}
    main_kinds = [ok for k in ("colour", "count", "relation") for ok in right[k]]
    report["colour_count_relation"] = {"right": sum(main_kinds), "of": len(main_kinds),
                                       "share": round(sum(main_kinds) / len(main_kinds), 4)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, report)
    print(json.dumps(report, indent=2))
    if args.mistakes:
        for (kind, _, question, answer), said in zip(questions, found):
            if said != answer:
                print(f"{kind:9s} {question}  right: {answer}  said: {said}")


def export_questions(folder: Path) -> None:
    """The questions of `--eval` as 0000.png, .. and questions.jsonl with id, kind, image, question, answer."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "questions.jsonl", "w") as f:
        for i, (kind, picture, question, answer) in enumerate(evaluation_questions()):
            picture.save(folder / f"{i:04d}.png")
            f.write(json.dumps({"id": i, "kind": kind, "image": f"{i:04d}.png", "question": question, "answer": answer}) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "weights" / "tiny-qwen3-vl",
                   help="the Hugging Face folder to write (and to evaluate)")
    p.add_argument("--work", type=Path, default=ROOT / "build" / "tiny-vl", help="where the checkpoint for resuming lives")
    p.add_argument("--minutes", type=float, default=60,
                   help="CPU minutes of each process, the training budget (default %(default)s)")
    p.add_argument("--wall-minutes", type=float, default=240, help="stop by then on a busy machine (default %(default)s)")
    p.add_argument("--processes", type=int, default=2, help="cores to train on (default %(default)s)")
    p.add_argument("--batch", type=int, default=32, help="pictures a step, over all processes")
    p.add_argument("--look-steps", type=int, default=300,
                   help="steps at first that train the vision tower alone (default %(default)s)")
    p.add_argument("--easy-steps", type=int, default=500,
                   help="steps over which easy scenes give way to full ones (default %(default)s)")
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--eval-every", type=float, default=180, help="seconds between the short held-out checks")
    p.add_argument("--smoke", action="store_true", help="leave --out alone")
    p.add_argument("--eval", action="store_true", help="only evaluate --out")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the evaluation (default %(default)s)")
    p.add_argument("--json", type=Path, help="where --eval writes its numbers")
    p.add_argument("--mistakes", action="store_true", help="with --eval: list the wrong answers")
    p.add_argument("--example", type=Path, metavar="PNG", help="only draw the example picture")
    p.add_argument("--eval-set", type=Path, metavar="DIR", help="only write the held-out questions to DIR")
    args = p.parse_args()
    if args.example:
        scenes.render(scenes.example_scene(), scale=5).save(args.example)
    elif args.eval_set:
        export_questions(args.eval_set)
    elif args.eval:
        evaluate(args)
    else:
        try:
            train(args)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
