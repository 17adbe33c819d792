"""The training of the tiny Qwen3-VL: pictures and questions (`scenes`), tokenizer (`vocab`), `batches`, `fast`, `optim`."""
