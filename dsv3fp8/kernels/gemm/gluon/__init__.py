"""FP8 GEMMs for Hopper in Gluon: grouped fprop and dgrad, grouped wgrad, one launch each. See grouped.py."""
