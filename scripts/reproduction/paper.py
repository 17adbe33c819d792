"""Numbers that the paper reports (arXiv 2602.03295), to stand beside ours. Accuracies in percent."""

TASKS = ("MMLU", "HellaSwag", "WinoGrande", "PIQA", "GSM8K", "HumanEval", "MultiFieldQA", "HotpotQA")
# Table 1, Llama-3.1-8B: method -> accuracy on TASKS, then their average.
LLAMA = {
    "full": (68.33, 79.50, 74.40, 81.12, 79.68, 68.29, 54.57, 55.66, 70.19),
    "POP": (67.43, 78.29, 73.40, 80.36, 77.26, 64.63, 52.88, 53.48, 68.47),
    "Wanda": (65.87, 78.96, 74.59, 80.74, 76.42, 65.84, 52.80, 53.03, 68.53),
    "SliceGPT": (34.97, 51.19, 66.54, 63.87, 0.91, 0.00, 12.35, 8.71, 29.82),
    "ShortGPT": (65.80, 61.93, 69.77, 70.51, 0.38, 0.00, 6.80, 3.81, 34.88),
}
# The averages of the other two models (over their own twelve tasks, with images): full, POP.
AVERAGES = {"Llama-3.1-8B, 10 of 32": (70.19, 68.47), "Gemma-3-12B, 16 of 48": (63.07, 62.95), "Qwen3-VL-8B, 12 of 36": (74.00, 73.16)}

# Time to first token, full over POP (A100, Hugging Face Transformers, batch 8) by prompt tokens.
LENGTHS = (32, 128, 512, 2048)
SPEEDUP = {"Llama-3.1-8B": (1.22, 1.27, 1.34, 1.36), "Gemma-3-12B": (1.02, 1.27, 1.34, 1.37)}

# The ablation of the design, Qwen3-VL-8B: GSM8K, HotpotQA.
ABLATION = {"full": (81.50, 65.49), "POP": (80.21, 63.13), "first third": (0.15, 0.00), "every third layer": (56.48, 6.81),
            "no K/V": (2.05, 1.18), "no boundary": (77.33, 11.45)}

# The ablation of the ratio, Qwen3-VL-8B at 1,024 tokens: share skipped -> speed-up, GSM8K, HotpotQA.
RATIOS = {0.20: (1.19, 83.09, 65.46), 0.25: (1.25, 82.34, 65.81), 0.33: (1.37, 80.21, 63.13), 0.40: (1.46, 80.82, 61.69),
          0.50: (1.67, 78.54, 34.69), 0.60: (1.96, 38.51, 5.45)}

# Skipped layers, full against POP: the lowest cosine of hidden states and of values, and what attention outputs stay above.
DRIFT = {"hidden": 0.71, "values": 0.46, "attention": 0.96}
