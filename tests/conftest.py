"""Shared fixtures: tiny random models, the real small model, and where the outside data lies.

Knows nothing of the parts under test but `quant.api`, which makes the artifacts others load.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: one compute thread keeps runs alike and 2-core machines quick.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The garbage collector walks all that is there again and again while half a million objects are
# imported for good, a third of the time; see `pytest_runtestloop`.
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples in every run, so that a change is judged by what it changed; new ones are looked
# for by `--hypothesis-profile explore`, and what that finds becomes an `@example`.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")

REPO = Path(__file__).resolve().parents[1]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = [
    "This agreement is made between the supplier and the customer for the term of the contract.",
    "The customer shall pay the fee within thirty days of the invoice date. Payment terms apply.",
    '{"party": "Acme", "amount": 1200, "currency": "EUR", "governing_law": "France"}',
    "def add(a, b):\n    return a + b\n",
]

# Small on purpose; GQA everywhere, and a head size that is not hidden / heads for Gemma and Qwen3.
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": 11},
    # Layer 1 has a dense MLP, as Qwen3-MoE may.
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def make_tokenizer(directory: Path) -> int:
    """Save a byte-level BPE tokenizer (about 300 ids, ChatML template); return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TRAINING_TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def make_tiny_model(directory: Path, family: str, dtype: torch.dtype, **overrides: Any) -> Path:
    """Save a seeded random model of `family` with its tokenizer, as a hub checkout would look."""
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab = make_tokenizer(directory)
    settings = {**COMMON, "vocab_size": vocab, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The usual init (std .02) leaves logits nearly flat: argmax would then be noise.
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(directory)
    return directory


def pytest_sessionstart(session: pytest.Session) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """All is imported, in a worker; the process that deals out the tests comes here too."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # or libraries complain at the exit of what they think has leaked


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family="llama", dtype=torch.float32, **config)` -> a Hugging Face directory."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        key = json.dumps([family, str(dtype), overrides], sort_keys=True, default=str)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"tiny-{family}")
            made[key] = make_tiny_model(directory, family, dtype, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small JSONL of texts that the tiny tokenizer can read."""
    path = tmp_path_factory.mktemp("calib") / "tiny.jsonl"
    rows = [{"text": (text + " ") * 6, "source": "contracts"} for text in TRAINING_TEXT]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def artifact(
    tmp_path_factory: pytest.TempPathFactory, calibration_file: Path
) -> Callable[..., Path]:
    """`artifact(model_dir, scheme="w4a16", method="rtn", ...recipe keys)` -> a sealed artifact."""
    made: dict[str, Path] = {}

    def make(model: Path, *, method: str = "rtn", **recipe: Any) -> Path:
        from quant.api import quantize

        settings = {"method": method, "skip": ["lm_head"], **recipe}
        key = json.dumps([str(model), settings], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp("artifact")
            file = folder / "recipe.yaml"
            file.write_text(json.dumps(settings))
            needs_text = method == "gptq" or recipe.get("kv_cache", "none") != "none"
            calib = calibration_file if needs_text else None
            made[key] = quantize(str(model), file, calib=calib, out=folder / "art", device="cpu")
        return made[key]

    return make


@pytest.fixture(scope="session")
def dense_artifact(artifact: Callable[..., Path]) -> Callable[[Path], Path]:
    """`dense_artifact(model_dir)` -> the same weights as an artifact, nothing quantized."""
    return lambda model: artifact(model, method="none", scheme="dense", skip=[])


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real small model; `make model` puts it into .cache/models."""
    folder = Path(os.environ.get("WEIGHBRIDGE_MODELS", REPO / ".cache" / "models"))
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"the real model is not at {path}: run `make model` first")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data beside the checkout (contracts, dialogs, traces); never part of the project."""
    folder = REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return folder
