"""Whatever it is given, minipop does the right thing or says in one line why not. What was tried stands in docs/TRUST.md.

core.py runs a target: a strategy for inputs and a check. files.py, engine.py and talk.py hold the targets, worlds.py the small complete
checkpoints they damage, oracle.py the arithmetic that results are held against. scripts/fuzz.py runs the same targets for longer.
"""
