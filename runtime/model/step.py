"""StepInputs: everything one forward pass needs to know, as an explicit argument.

The engine fills it (`runtime.engine.batch`), the decoder reads it; the type lives here so that no
import points upward. A batch is a list of *spans*: span i is `query_lens[i]` new tokens of one
sequence whose KV then holds `seq_lens[i]` tokens. A decode is a span of one.

Shape legend: T tokens in the step, S spans, R rows of logits, B blocks of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Tensors of one step, on the model's device; integer tensors are int64.

    token_ids_T, positions_T: ids and absolute positions of the new tokens, spans one after another.
    slots_T: where each new token's K/V goes: block id * block_size + offset in the block.
    block_tables_SB: physical block ids of each span's sequence, padded with 0.
    query_lens, seq_lens: per span, plain ints (host side): new tokens; KV length including them.
    logit_rows_R: indices into T whose logits are wanted (the last row of a span that samples;
        every row where prompt log-probs are asked for); None: all of T.
    wants_last_rows: those are the last row of every span and no others.

    On a device with kernels of our own the same facts lie on the device too, int32:
    query_starts_S1: first row in T of each span, then T; seq_lens_S: `seq_lens`; block_tables_SB is
        int32 there as well.
    num_decodes: so many spans at the front have one token each. max_query_len: longest span.
    A captured decode step leaves `query_lens` and `seq_lens` empty (they change from replay to
    replay); its padding rows have seq_len 0 and slot -1, which write nothing.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    block_tables_SB: torch.Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    logit_rows_R: torch.Tensor | None
    query_starts_S1: torch.Tensor | None = None
    seq_lens_S: torch.Tensor | None = None
    num_decodes: int = 0
    max_query_len: int = 0
    wants_last_rows: bool = False
