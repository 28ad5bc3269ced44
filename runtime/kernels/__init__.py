"""One folder per op: a typed function that picks, a torch reference that defines, kernels."""
