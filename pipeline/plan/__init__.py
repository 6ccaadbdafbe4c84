"""What a run would cost: a model of one training step, of the target beside it and of the answers, and `invoke plan`.

gpus.py shapes.py     the hardware's rates; the target's shape
costs.py memory.py    seconds and bytes of each part, by formula and a few constants
points.py             those constants against what was measured
split.py              which GPUs are targets and which drafters
report.py             the plan of one run, as a table and as JSON
"""
