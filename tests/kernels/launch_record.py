"""Which kernels a decoder of the 8B shape asks for on a pretended H200, and when; JSON on stdout.

    python launch_record.py KV_DTYPE [TOKENS ...]     (the repository on PYTHONPATH)

{"ahead": how many kernels are compiled ahead, "worst": [...], "256": [...]}: what the worst step,
and first greedy answers to prompts of so many TOKENS, launch besides. Runs in its own process,
since Triton's interpreter knows no constants. Launches nothing and computes no product: weights
are memory that nobody has touched.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from runtime.engine import cuda_runner
from runtime.engine.batch import Piece
from runtime.engine.cuda_runner import CudaRunner
from runtime.engine.load import make_cache
from runtime.engine.step_plan import GREEDY, RunnerLimits
from runtime.kernels import dense
from runtime.kernels.backend import KernelTarget
from runtime.kernels.linear.weights import DenseWeight
from runtime.kernels.w4a16.pack import W4A16Weight, _reserve
from runtime.kernels.workspace import KernelOptions, Workspace
from runtime.model.decoder import Decoder, DecoderLayer, Norms
from runtime.model.linear import Linear
from runtime.model.spec import ModelSpec

H200 = KernelTarget(
    name="NVIDIA H200", arch=90, num_sms=132, has_pdl=True, has_fp8=True, has_ptx=True
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 3,
    "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
LIMITS = RunnerLimits(
    max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=131072, block_size=16
)
BF16, CPU = torch.bfloat16, torch.device("cpu")


class Recorder:
    """Takes every launch; keeps what Triton would compile a kernel for, by phase."""

    def __init__(self) -> None:
        self.phase, self.seen = "", {}  # type: str, dict[str, set[str]]

    def take(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        params = {param.name: param for param in function.params}
        given = {**dict(zip(params, args, strict=False)), **kwargs}
        traits = {name: trait(params.get(name), value) for name, value in sorted(given.items())}
        about = f"{function.fn.__name__} {traits}"
        self.seen.setdefault(self.phase, set()).add(about)

    def missing(self, phase: str) -> list[str]:
        return sorted(self.seen[phase] - self.seen["ahead"])

    @contextmanager
    def ahead(self, num_workers: int) -> Iterator[None]:
        """Stands for `compiling_ahead`."""
        phase, self.phase = self.phase, "ahead"
        yield
        self.phase = phase


def trait(param: Any, value: Any) -> Any:
    if param is None or param.is_constexpr:
        return (type(value).__name__, str(value))
    if isinstance(value, Tensor):
        return (str(value.dtype), value.data_ptr() % 16 == 0)
    if isinstance(value, int):
        return "int" if param.do_not_specialize else ("int", value == 1, value % 16 == 0)
    if hasattr(value, "block_shape"):
        return (str(value.base.dtype), tuple(value.block_shape), str(value.layout))
    return type(value).__name__


def pretend(recorder: Recorder) -> None:
    for module in pkgutil.walk_packages(
        import_module("runtime.kernels").__path__, "runtime.kernels."
    ):
        import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("runtime."):
            for attribute, fake in (("uses_triton", True), ("target_of", H200)):
                if hasattr(module, attribute):
                    setattr(module, attribute, lambda device, fake=fake: fake)
    cuda_runner.compiling_ahead = recorder.ahead  # type: ignore[assignment]
    JITFunction.run = lambda self, *args, grid, warmup, **kw: recorder.take(self, args, kw)
    dense._library = lambda x, w, bias, dtype: torch.empty(len(x), len(w), dtype=dtype)
    torch.mm = lambda a, b, out: out
    Tensor.addmm_ = lambda self, a, b: self


def decoder() -> Decoder:
    spec = ModelSpec.from_config(CONFIG)
    options = KernelOptions(workspace=Workspace(CPU))

    def linear(out: int, width: int) -> Linear:
        _reserve((out, width), 128, CPU, options)
        weight = W4A16Weight(
            codes=torch.empty(out // 16, width // 128, 16, 32, dtype=torch.int16),
            scale=torch.empty(out // 16, width // 128, 16, dtype=BF16), zero_point=None,
            shape=(out, width), groups_per_block=1, dtype=BF16, options=options,
        )  # fmt: skip
        return Linear(weight=weight, bias=None, label="w4a16-g128", rows=(out,))

    norm = torch.ones(spec.hidden)
    norms = Norms(attention=norm, after_attention=None, mlp=norm, after_mlp=None, q=None, k=None)
    embedding_VE = torch.empty(spec.vocab, spec.hidden, dtype=BF16)
    head = DenseWeight(matrix=embedding_VE, is_transposed=False, options=options)
    return Decoder(
        spec=spec,
        layers=tuple(
            DecoderLayer(
                spec=layer, qkv=linear(6144, 4096), o=linear(4096, 4096),
                gate_up=linear(28672, 4096), down=linear(4096, 14336), norms=norms,
            )
            for layer in spec.layers
        ),
        embedding_VE=embedding_VE, final_norm=norm, kv_scales=(None,) * len(spec.layers),
        head=Linear(weight=head, bias=None, label="dense", rows=(spec.vocab,)),
        options=options, num_positions=8192,
    )  # fmt: skip


def answer(runner: CudaRunner, num_tokens: int) -> None:
    """The steps of a greedy answer to one prompt."""
    blocks = range(-(-num_tokens // LIMITS.block_size))
    piece = Piece(tokens=[0] * num_tokens, start=0, block_ids=list(blocks), wanted=[num_tokens - 1])
    logits_RV = runner.logits(runner.forward([piece]))
    slots_R = torch.zeros(1, dtype=torch.int32)
    runner._draw(logits_RV, slots_R, GREEDY, torch.empty_like(slots_R))
    runner.run_padding(1, GREEDY)


@torch.inference_mode()
def main() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    recorder = Recorder()
    pretend(recorder)
    model = decoder()
    first, *others = sys.argv[1].split("+")  # of the last layers, one each
    dtypes = [first] * (len(model.layers) - len(others)) + others
    kv = make_cache(model, dtypes, LIMITS.max_num_batched_tokens // LIMITS.block_size, 16)
    runner = CudaRunner(model, kv, LIMITS, use_graphs=False)
    runner.compile_ahead()
    found: dict[str, Any] = {"ahead": len(recorder.seen["ahead"])}
    recorder.phase = "worst"
    runner.run_worst_step()
    for num_tokens in sys.argv[2:]:
        recorder.phase = num_tokens
        answer(runner, int(num_tokens))
    found |= {phase: recorder.missing(phase) for phase in ("worst", *sys.argv[2:])}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
