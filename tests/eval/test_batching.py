"""What the reference answers together."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from eval.targets.base import Prompt
from eval.targets.batching import BatchLimits, batches, limits_of

PROMPTS = st.lists(
    st.builds(
        lambda width, most: Prompt(token_ids=(1,) * width, max_tokens=most),
        st.integers(1, 60), st.integers(1, 40),
    ),
    max_size=30,
)  # fmt: skip


@given(PROMPTS, st.integers(1, 8), st.integers(1, 300))
def test_each_prompt_comes_once_and_no_batch_is_beyond_its_limits(
    prompts: list[Prompt], rows: int, tokens: int
) -> None:
    found = list(batches(prompts, BatchLimits(rows=rows, tokens=tokens)))
    assert sorted(i for batch in found for i in batch) == list(range(len(prompts)))
    for batch in found:
        asked = [prompts[i] for i in batch]
        longest = max(len(p.token_ids) for p in asked) + max(p.max_tokens for p in asked)
        assert len(batch) == 1 or (len(batch) <= rows and len(batch) * longest <= tokens)


@given(PROMPTS, st.integers(1, 8))
def test_like_prompts_and_like_answers_go_together(prompts: list[Prompt], rows: int) -> None:
    """Six batches hold prompts no longer than any after them, and among them answers rise."""
    found = list(batches(prompts, BatchLimits(rows=rows, tokens=10**6)))
    assert all(len(batch) == rows for batch in found[:-1])
    order = [prompts[i] for batch in found for i in batch]
    parts = [order[at : at + 6 * rows] for at in range(0, len(order), 6 * rows)]
    for part in parts:
        assert [p.max_tokens for p in part] == sorted(p.max_tokens for p in part)
    widths = [[len(p.token_ids) for p in part] for part in parts]
    assert all(max(one) <= min(two) for one, two in zip(widths, widths[1:], strict=False))


def test_a_large_model_gets_small_batches() -> None:
    """8B: 32 layers of 8 heads of 128 in float32 take 256 KiB a token, so 2 GiB hold 8,192."""
    config = SimpleNamespace(
        num_hidden_layers=32, num_key_value_heads=8, head_dim=128, num_attention_heads=32
    )
    assert limits_of(config, "cpu") == BatchLimits(rows=16, tokens=8192)
    plain = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=64)
    assert limits_of(plain, "cpu").tokens == (2 << 30) // (2 * 4 * 2 * 4 * 16)
