"""The vLLM plugin, held against minipop's own Runner. Runs with `pytest -m vllm` in the environment that scripts/setup_vllm.sh makes."""
