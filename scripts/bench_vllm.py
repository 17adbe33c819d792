"""Time to first token in vLLM, with and without POP, in one run; needs the environment of scripts/setup_vllm.sh.

    python scripts/bench_vllm.py --ckpt weights/smollm2-135m-instruct

Two engines run one after the other; each answers prompts of random ids with one token, one prompt at a time, without a prefix cache.
The first prompt of every length is not counted.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time


def measure(args: argparse.Namespace) -> None:
    """In a process of its own: the seconds of every prompt, as the last line of stdout."""
    from vllm import LLM, SamplingParams

    longest = max(args.tokens)
    engine = {"model": args.ckpt, "dtype": args.dtype, "skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": False,
              "max_model_len": longest + 1, "max_num_batched_tokens": longest, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 30}
    if args.measure == "pop":
        engine["additional_config"] = {"minipop": {"ratio": args.ratio}}
    llm = LLM(**engine)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng, seconds = random.Random(0), {}
    for count in args.tokens:
        seconds[count] = []
        for _ in range(args.repeats + 1):
            prompt = {"prompt_token_ids": [rng.randrange(100, 1000) for _ in range(count)]}
            start = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            seconds[count].append(time.perf_counter() - start)
    print("\n" + json.dumps(seconds), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, metavar="PATH")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ratio", default="1/3", help="share of the layers that the prompt skips (default: %(default)s)")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[512, 2048], help="prompt lengths (default: 512,2048)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", choices=("full", "pop"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return 0
    found = {}
    for which in ("full", "pop"):
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--measure", which], stdout=subprocess.PIPE, text=True, check=False,
                              env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"} | os.environ)
        if done.returncode:
            return done.returncode
        found[which] = {int(n): times[1:] for n, times in json.loads(done.stdout.splitlines()[-1]).items()}
    print(f"time to first token, seconds: median of {args.repeats} (fastest), {args.ckpt}, {args.dtype}, ratio {args.ratio}")
    for count in args.tokens:
        full, pop = found["full"][count], found["pop"][count]
        print(f"{count:6} tokens   full {statistics.median(full):.3f} ({min(full):.3f})   POP {statistics.median(pop):.3f} ({min(pop):.3f})   "
              f"{statistics.median(full) / statistics.median(pop):.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
