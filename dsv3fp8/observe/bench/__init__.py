"""`dsv3fp8 bench`: how fast the kernels, a linear, a layer and whole steps are, each beside its peer in one run."""
