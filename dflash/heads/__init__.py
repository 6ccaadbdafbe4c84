"""Successors of DFlash as options of its drafter; each starts as plain DFlash, bit for bit. None is on by default.

convolution     conv.py: slots mix along the block inside the draft layers (DFlash 2)
path selector   selector.py: neighboring slots are chosen together, among their best candidates (DFlash 2)
Markov bias     markov.py: a low-rank bias on the logits from the token before the slot (DSpark)

Selector and Markov bias look at the token before a slot: the true one in training, the drafted one in decoding. Their
losses train them alone and leave the drafter's own gradient as it is.
"""
