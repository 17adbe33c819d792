"""The parts of scripts/reproduce.py: the paper's numbers (paper.py), ours (steps.py), and both side by side (report.py)."""
