"""Train DeepSeek-V3-style models under FP8 recipes that say what every operation computes in.

Kept free of imports: `import dsv3fp8` costs nothing and works without a GPU, Triton or even torch being usable.
"""

__version__ = "0.1.0"
