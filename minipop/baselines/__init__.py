"""The methods that Prefill-Only Pruning is compared with in its paper. Each turns a model into a smaller or sparser one:

    shortgpt    removes whole layers, those that change the stream least       (arXiv 2403.03853)
    slicegpt    rotates the stream and cuts off its least important columns    (arXiv 2401.15024)
    wanda       zeroes weights that are small and read small inputs            (arXiv 2306.11695)

All of them prune for both stages, once and for good, and look only at what a calibration text does inside the model. What comes back
runs in the same `Runner`; `save_pruned` writes it as a checkpoint. On the command line: `python -m minipop.baselines --help`.
"""

from .checkpoints import save_pruned
from .shortgpt import block_influence, shortgpt
from .slicegpt import slicegpt
from .wanda import wanda

__all__ = ["block_influence", "save_pruned", "shortgpt", "slicegpt", "wanda"]
