"""Drafters of other projects: read into this project's folder (z-lab's layout), and written for theirs.

zlab.py         z-lab's config.json and its dialects (SpecForge, Model-Optimizer, Automodel)
speculators.py  speculators' nested config, its layer numbers, its own embedding and head
torchspec.py    TorchSpec's tensor names and flat config
readings.py     what each project computes where a sliding layer's config is silent
heads.py        tensors of DFlash's successors, by name
reader.py       which of these a folder is, and the drafter in it
files.py        files in, folders out
engines.py      the command line that serves a drafter, and what an engine would compute otherwise
"""
