"""One folder per op: a typed function that picks, a torch reference that defines, kernels.

linear     x W^T over dense, w4a16, w8a16, w8a8 and fp8 weights
attention  causal, windowed attention over the paged KV pool
kv_store   new keys and values into the pool
norm       RMSNorm, with and without the residual
rope       rotary embedding in place
gate       act(gate) * up

Knows no models and no requests.
"""

import os

# Products are fused with the sums they go into. Triton 3.9 warns unless that is said, and 3.10 will
# not do it; nothing is compiled before the first launch.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
