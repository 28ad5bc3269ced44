"""Tiny random models three ways: transformers' own, ours, and an artifact held in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quant.artifact import layout
from quant.artifact.scheme import DENSE, Scheme
from runtime.model.decoder import Decoder
from runtime.model.kv_cache import KVCache
from runtime.model.loader import load_decoder
from runtime.model.step import StepInputs

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(slots=True, kw_only=True)
class MemoryReader:
    """The reader's interface over a dictionary; also records what was read."""

    tensors: dict[str, torch.Tensor]
    read: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.tensors[name]


@dataclass(slots=True, kw_only=True)
class MemoryArtifact:
    """What `load_decoder` needs of an artifact."""

    config: Mapping[str, Any]
    reader: MemoryReader
    modules: dict[str, Scheme]
    kv: dict[int, tuple[float, float]] = field(default_factory=dict)

    def schemes(self) -> dict[str, Scheme]:
        return self.modules

    def weight(self, module: str) -> layout.QuantizedWeight | torch.Tensor:
        scheme = self.modules[module]
        names = layout.tensor_names(scheme)
        tensors = {name: self.reader.tensor(f"{module}.{name}") for name in names}
        return tensors["weight"] if scheme.is_dense else layout.from_tensors(tensors, scheme)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        return self.kv.get(layer)


def make_hf(family: str, seed: int = 0, **changes: Any) -> Any:
    """A seeded random float32 transformers model whose logits are far from flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**BASE, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def artifact_of(
    model: Any, scheme: Scheme = DENSE, config: Mapping[str, Any] | None = None
) -> MemoryArtifact:
    """The model as an artifact; linears in layers get `scheme` by rounding."""
    tied = bool(model.config.tie_word_embeddings)
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, Scheme] = {}
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if tied and name == "lm_head.weight":
            modules[module] = DENSE
            continue
        tensors[name] = tensor.clone()
        if module in linears and leaf == "weight":
            modules[module] = scheme if module != "lm_head" else DENSE
            if not modules[module].is_dense:
                del tensors[name]
                qw = rtn(tensor, scheme)
                tensors |= {f"{module}.{n}": t for n, t in layout.to_tensors(qw).items()}
    return MemoryArtifact(
        config=dict(config or model.config.to_dict()),
        reader=MemoryReader(tensors=tensors),
        modules=modules,
    )


def rtn(
    weight: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32
) -> layout.QuantizedWeight:
    assert scheme.weights is not None
    scale, zero_point = layout.min_max_qparams(weight.float(), scheme.weights, scale_dtype)
    return layout.quantize(weight.float(), scale, zero_point, scheme)


def load(
    artifact: MemoryArtifact, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    return load_decoder(artifact, device=device, dtype=dtype)


@dataclass(slots=True, kw_only=True)
class Sequence_:
    """Token ids, how many of them are computed, and the blocks that hold their KV."""

    ids: Sequence[int]
    blocks: list[int]
    computed: int = 0


def poisoned_cache(
    decoder: Decoder, num_blocks: int = 40, block_size: int = 16, dtype: str = "float32"
) -> KVCache:
    """A pool full of NaN: whoever reads a slot nobody wrote is found out."""
    kv = KVCache(
        decoder.spec, num_blocks, block_size, dtype, scales=decoder.kv_scales, device=decoder.device
    )
    for pool in kv.pools:
        if pool.dtype == torch.float8_e4m3fn:
            pool.view(torch.uint8)[:num_blocks] = 0x7F
        elif pool.dtype.is_floating_point:
            pool[:num_blocks] = torch.nan
    for scales in kv.token_scales:
        if scales is not None:
            scales[:num_blocks] = torch.nan
    return kv


def run_step(
    decoder: Decoder, kv: KVCache, work: Sequence[tuple[Sequence_, int]]
) -> list[torch.Tensor]:
    """Compute `n` more tokens of each sequence in one step; logits [n, V] of every new token."""
    size = kv.block_size
    ids, positions, slots = [], [], []
    for seq, n in work:
        for p in range(seq.computed, seq.computed + n):
            ids.append(seq.ids[p])
            positions.append(p)
            slots.append(seq.blocks[p // size] * size + p % size)
        seq.computed += n
    width = max(len(seq.blocks) for seq, _ in work)
    step = StepInputs(
        token_ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        block_tables_SB=torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s, _ in work]),
        query_lens=tuple(n for _, n in work),
        seq_lens=tuple(seq.computed for seq, _ in work),
        logit_rows_R=torch.arange(len(ids)),
    )
    logits = decoder.logits(decoder.forward(step, kv))
    return list(logits.split([n for _, n in work]))


def run_alone(
    decoder: Decoder,
    ids: Sequence[int],
    chunks: Sequence[int],
    *,
    block_size: int = 16,
    kv_dtype: str = "float32",
) -> torch.Tensor:
    """Logits [n, V] of a sequence computed in these chunks, its blocks in falling order."""
    num_blocks = -(-len(ids) // block_size)
    kv = poisoned_cache(decoder, num_blocks + 2, block_size, kv_dtype)
    seq = Sequence_(ids=ids, blocks=list(range(num_blocks, 0, -1)))
    return torch.cat([run_step(decoder, kv, [(seq, n)])[0] for n in chunks])


@torch.no_grad()
def hf_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def random_ids(n: int, seed: int = 0, vocab: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (n,), generator=generator).tolist()
