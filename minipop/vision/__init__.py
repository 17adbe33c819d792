"""Vision towers: pixels in, rows for the decoder out.

`qwen.py` is Qwen3-VL's tower, `siglip.py` Gemma-3's; both stack the same `block.py`. A tower knows nothing of text: it hands
over `VisionRows`, and the model puts them where the prompt has its image placeholders.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class VisionRows:
    """What a tower hands to the decoder: R rows, as wide as the text stream (D), the images in order.

    rows: [R, D], one row an image token; they replace the embeddings of the placeholders.
    counts: rows of each image, summing to R; the model checks them against the prompt's placeholders.
    deepstack: each [R, D]; the first is added to the same rows of the stream after text layer 0, the next after layer 1, ...
        (DeepStack, arXiv 2406.04334). Empty for a model without.
    """

    rows: Tensor
    counts: tuple[int, ...]
    deepstack: tuple[Tensor, ...] = ()
