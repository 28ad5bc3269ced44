"""Keys of a GPTQ or AWQ section that nobody here knows: they may change what the bits mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_READ = frozenset(
    {
        "quant_method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "dynamic",
        "zero_point", "checkpoint_format", "version", "pack_dtype", "is_marlin_format",
    }
)  # fmt: skip
# Keys of AutoGPTQ, GPTQModel, AutoAWQ, llm-awq and transformers that say how the codes were found
# or how they may be run, and nothing of what they mean.
_HARMLESS = frozenset(
    {
        "static_groups", "true_sequential", "lm_head",
        "meta", "damp_percent", "damp_auto_increment", "model_name_or_path",
        "format", "backend", "model_file_base_name", "is_marlin_format", "dataset", "tokenizer",
        "batch_size", "block_name_to_quantize", "module_name_preceding_first_block",
        "modules_in_block_to_quantize", "cache_block_outputs", "dynamic", "pad_token_id",
        "use_cuda_fp16", "use_exllama", "max_input_length", "exllama_config", "model_seqlen",
        "mse", "act_group_aware", "quantizer", "adapter", "rotation", "parallel_packing",
        "offload_to_disk", "offload_to_disk_path", "device", "compute_device_filter",
        "is_distributed", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len",
        "modules_to_fuse", "disable_exllama", "v2", "v2_alpha", "gptaq", "foem", "failsafe",
        "gptaq_alpha", "moe", "hessian", "fallback", "pack_impl"
    }
)  # fmt: skip


def unknown_keys_note(section: Mapping[str, Any]) -> tuple[str, ...]:
    """A note that names the keys of `section` that no known writer uses; () where there are none.

    What another tool's newest release writes is converted all the same: `evaluate` judges it.
    """
    unknown = [key for key in section if key not in _READ and key not in _HARMLESS]
    if section.get("quant_method") == "compressed-tensors" or not unknown:
        return ()
    return (
        "quantization_config has keys that are not known here and were not used: "
        f"{', '.join(unknown)}; judge the result with `evaluate` before you serve it",
    )
