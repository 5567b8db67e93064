"""The training room: loop, optimizer, schedule, checkpoints, metrics, loggers and sampling.

It knows models, corpora and recipes only through their public methods, and knows nothing of kernels.
"""
