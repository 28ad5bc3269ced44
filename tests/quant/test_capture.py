"""Statistics: only real tokens count, whatever the batches look like."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quant.capture import InputStatistics, Stream, collect_inputs, make_batches
from quant.errors import NonFiniteError


def windows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 50, (n,), generator=generator).tolist() for n in lengths]


class Toy(nn.Module):
    """An embedding whose padding row is enormous, then a linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.randn(50, 16)
        self.table[0] = 1e6
        self.linear = nn.Linear(16, 4, bias=False)

    def stream(self, samples: list[list[int]], batch_tokens: int) -> Stream:
        batches = make_batches(samples, batch_tokens)
        return Stream(batches=batches, hidden=[self.table[b.token_ids] for b in batches])

    def statistics(self, samples: list[list[int]], batch_tokens: int) -> InputStatistics:
        return collect_inputs(
            self.linear, self.stream(samples, batch_tokens), lambda h, _: self.linear(h), "toy",
            needs_hessian=True,
        )  # fmt: skip


LENGTHS = (3, 120, 7, 64, 5, 90, 11, 33)


def test_padding_counts_for_nothing() -> None:
    samples, toy = windows(*LENGTHS), Toy()
    rows = torch.cat([toy.table[torch.tensor(s)] for s in samples]).double()
    for batch_tokens in (1, 256, 8 * 120):
        found = toy.statistics(samples, batch_tokens)
        assert found.num_tokens == sum(LENGTHS)
        torch.testing.assert_close(found.hessian, rows.T @ rows)
        torch.testing.assert_close(found.mean_square, rows.square().mean(0).float())
        assert torch.equal(found.absmax, rows.abs().amax(0).float())


def test_order_of_samples_moves_rounding_only() -> None:
    """Largest last, largest first: the statistics are final before a scale is chosen."""
    samples, toy = windows(*LENGTHS), Toy()
    up = toy.statistics(samples, 256)
    down = toy.statistics(samples[::-1], 256)
    torch.testing.assert_close(up.hessian, down.hessian)
    assert torch.equal(up.absmax, down.absmax)


@pytest.mark.parametrize("batch_tokens", [1, 100, 500, 10_000])
def test_batches_hold_every_sample_once(batch_tokens: int) -> None:
    samples = windows(*LENGTHS)
    batches = make_batches(samples, batch_tokens)
    assert sorted(i for batch in batches for i in batch.samples) == list(range(len(samples)))
    for batch in batches:
        assert len(batch.samples) == 1 or batch.token_ids.numel() <= batch_tokens
        for row, sample in enumerate(batch.samples):
            assert batch.token_ids[row][batch.mask[row]].tolist() == samples[sample]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_inputs_name_module_and_sample(value: float) -> None:
    samples, toy = windows(5, 9, 7), Toy()
    samples[1][4] = 49
    for sample in (samples[0], samples[2]):
        sample[:] = [min(token, 48) for token in sample]
    samples[1][:4] = [1, 2, 3, 4]
    toy.table[49] = value
    with pytest.raises(NonFiniteError, match="the input of toy .* calibration sample 1 "):
        toy.statistics(samples, 1000)


def test_non_finite_padding_is_no_fault() -> None:
    toy = Toy()
    toy.table[0] = float("nan")
    assert toy.statistics(windows(5, 9), 1000).num_tokens == 14


def test_non_finite_outputs_name_the_layer() -> None:
    toy = Toy()
    stream = toy.stream(windows(5), 100)
    with pytest.raises(NonFiniteError, match="the output of layer 3"):
        stream.advance(lambda hidden, _: hidden / 0, "layer 3")


def test_no_tokens_at_all() -> None:
    empty = InputStatistics(num_inputs=4, device=torch.device("cpu"), needs_hessian=True)
    empty.add(torch.zeros(0, 4))
    assert (empty.num_tokens, float(empty.mean_square.sum())) == (0, 0.0)
