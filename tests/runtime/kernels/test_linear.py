"""Every way of multiplying against the layout's definition, odd shapes and worst cases included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quant.artifact import layout
from quant.artifact.layout import QuantizedWeight
from quant.artifact.scheme import PRESETS, Scheme, WeightScheme, with_group_size
from runtime.kernels import linear as linear_module
from runtime.kernels.linear import (
    DenseWeight,
    DynamicWeight,
    PackedInt4Weight,
    linear,
    pack_dense,
    pack_quantized,
    reconstruct,
)
from runtime.kernels.linear.cpu import INT4_MAX_TOKENS, has_exact_int8
from runtime.kernels.linear.reference import effective_weight, linear_reference

CPU = torch.device("cpu")


def asymmetric(bits: int, group: int | None) -> Scheme:
    return Scheme(
        layout="pack-quantized",
        weights=WeightScheme(
            num_bits=bits,
            kind="int",
            symmetric=False,
            strategy="group" if group else "channel",
            group_size=group,
        ),
    )


SCHEMES = [
    with_group_size(PRESETS["w4a16"], 32),
    with_group_size(PRESETS["w4a16"], 64),
    with_group_size(PRESETS["w4a16"], None),
    asymmetric(4, 32),
    asymmetric(8, 64),
    with_group_size(PRESETS["w8a16"], 64),
    with_group_size(PRESETS["w8a16"], None),
    with_group_size(PRESETS["w3a16"], 32),
    asymmetric(3, 64),
    with_group_size(PRESETS["w4a8"], 32),
    with_group_size(PRESETS["w4a8-fp8"], 64),
    PRESETS["w8a8"],
    PRESETS["fp8"],
]
# (out, in): 576 does not split into 128s; 63 and 1000 fit no tile.
SHAPES = [(63, 64), (1000, 192), (96, 576)]


def quantized(shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    torch.manual_seed(shape[0])
    weight = torch.randn(shape) * 0.3
    assert scheme.weights is not None
    scale, zero_point = layout.min_max_qparams(weight, scheme.weights, dtype)
    return layout.quantize(weight, scale, zero_point, scheme)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN: a kernel that leaves a hole is found out."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_is_the_definition(
    shape: tuple[int, int], scheme: Scheme, scale_dtype: torch.dtype
) -> None:
    qw = quantized(shape, scheme, scale_dtype)
    packed = pack_quantized(qw, torch.float32, CPU)
    assert torch.equal(reconstruct(packed), effective_weight(qw))
    bias = torch.randn(shape[0])
    for rows in (0, 1, 7, 33):
        x = torch.randn(rows, shape[1])
        found, wanted = linear(x, packed, bias), linear_reference(x, qw, bias)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [*SHAPES, (48, 1536)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_bfloat16_is_the_definition_rounded(shape: tuple[int, int], scheme: Scheme) -> None:
    qw = quantized(shape, scheme, torch.bfloat16)
    packed = pack_quantized(qw, torch.bfloat16, CPU)
    torch.testing.assert_close(reconstruct(packed), effective_weight(qw), atol=0.0, rtol=2**-8)
    for rows in (1, 5, INT4_MAX_TOKENS, INT4_MAX_TOKENS + 1):
        x = torch.randn(rows, shape[1]).bfloat16()
        found, wanted = linear(x, packed).float(), linear_reference(x, qw)
        assert float((found - wanted).norm() / wanted.norm()) < 2**-7


@pytest.mark.parametrize("without_vnni", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (48, 1536)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label)
def test_float16_is_the_definition_rounded(
    shape: tuple[int, int], scheme: Scheme, without_vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where sums of codes would leave its range, as those of equal signs do."""
    if without_vnni:
        monkeypatch.setattr(linear_module, "has_exact_int8", lambda: False)
    qw = quantized(shape, scheme, torch.float16)
    packed = pack_quantized(qw, torch.float16, CPU)
    x = torch.cat([torch.randn(5, shape[1]), torch.ones(1, shape[1])]).half()
    wanted = linear_reference(x, qw)
    found = linear(x, packed)
    assert found.dtype == torch.float16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 2**-9


def test_int4_kernel_serves_where_it_is_exact() -> None:
    sym = with_group_size(PRESETS["w4a16"], 64)

    def kind(scheme: Scheme, dtype: torch.dtype, scale: torch.dtype, rows: int = 96) -> type:
        return type(pack_quantized(quantized((rows, 128), scheme, scale), dtype, CPU))

    assert kind(sym, torch.bfloat16, torch.bfloat16) is PackedInt4Weight
    assert kind(sym, torch.bfloat16, torch.float32) is PackedInt4Weight
    # float16 scales, zero points and odd rows do not fit; float32 compute must stay float32.
    assert kind(sym, torch.bfloat16, torch.float16) is DenseWeight
    assert kind(asymmetric(4, 64), torch.bfloat16, torch.bfloat16) is DenseWeight
    assert kind(sym, torch.bfloat16, torch.bfloat16, rows=63) is DenseWeight
    assert kind(sym, torch.float32, torch.bfloat16) is DenseWeight


def test_int4_kernel_beats_rounding_the_weight() -> None:
    """The packed kernel multiplies codes and scales exactly; only outputs are rounded."""
    qw = quantized((96, 576), with_group_size(PRESETS["w4a16"], 64), torch.float32)
    x = torch.randn(4, 576).bfloat16()
    packed = pack_quantized(qw, torch.bfloat16, CPU)
    assert isinstance(packed, PackedInt4Weight)
    wanted = linear_reference(x, qw)
    error = (linear(x, packed).float() - wanted).abs()
    assert bool((error <= wanted.abs() * 2**-8 + 1e-3).all())


def extreme_rows(width: int) -> Tensor:
    """Inputs whose codes are all at an end of the range, and alternating ends."""
    ones = torch.ones(width)
    alternating = torch.tensor([1.0, -1.0]).repeat(width // 2 + 1)[:width]
    signs = torch.stack([ones, -ones, alternating, -alternating])
    # Whether -absmax becomes -127 or -128 hangs on the last bit of the scale: try several.
    return torch.cat([signs * magnitude for magnitude in (1.0, 1.1, 1.3, 1.7, 1.9)])


@pytest.mark.parametrize("width", [64, 576, 1040, 4096])
@pytest.mark.parametrize("without_vnni", [False, True])
def test_int8_extremes_are_exact(
    width: int, without_vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All codes +127 / -128: what saturates in 16 bits on CPUs without the instructions."""
    if without_vnni:
        monkeypatch.setattr(linear_module, "has_exact_int8", lambda: False)
    codes = torch.stack([torch.full((width,), c, dtype=torch.int8) for c in (127, -128)] * 8)
    codes[4, ::2] = -128
    qw = QuantizedWeight(
        scheme=PRESETS["w8a8"], codes=codes, scale=torch.full((16, 1), 0.5), zero_point=None
    )
    packed = pack_quantized(qw, torch.float32, CPU)
    assert isinstance(packed, DynamicWeight)
    assert packed.is_integer == (has_exact_int8() and not without_vnni)
    x = extreme_rows(width)
    x_codes, x_scale = layout.quantize_activations(x, packed.activations)
    assert {127, -128} <= set(x_codes.unique().tolist()) <= {127, -127, -128}
    exact = (x_codes.double() @ codes.double().T) * x_scale.double() * 0.5
    torch.testing.assert_close(linear(x, packed).double(), exact, rtol=3e-7, atol=0.0)


def test_the_integer_path_needs_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not has_exact_int8()


def test_the_integer_path_needs_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions present, library restricted to ones that saturate: the sums tell."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    int_mm = torch._int_mm

    def saturating(a: Tensor, b: Tensor) -> Tensor:
        return int_mm(a, b).clamp(-(2**15) * 32, (2**15 - 1) * 32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not has_exact_int8()


@pytest.mark.parametrize("scheme", [PRESETS["w8a8"], PRESETS["fp8"]], ids=lambda s: s.label)
def test_activation_scales_are_per_row(scheme: Scheme) -> None:
    """A loud neighbour does not change a quiet row by a single bit."""
    packed = pack_quantized(quantized((96, 192), scheme, torch.float32), torch.float32, CPU)
    quiet, loud = torch.randn(1, 192), torch.randn(1, 192) * 1e4
    alone = linear(quiet, packed)
    torch.testing.assert_close(linear(torch.cat([quiet, loud]), packed)[:1], alone, rtol=1e-6,
                               atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense(dtype: torch.dtype) -> None:
    weight, x, bias = torch.randn(63, 576), torch.randn(5, 576), torch.randn(63)
    packed = pack_dense(weight, dtype, CPU)
    assert torch.equal(reconstruct(packed), weight.to(dtype).float())
    wanted = x.to(dtype).float() @ weight.to(dtype).float().T
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    for b in (None, bias.to(dtype)):
        found = linear(x.to(dtype), packed, b).float()
        expected = wanted if b is None else wanted + b.float()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-2)


def test_packing_does_not_touch_the_artifact() -> None:
    qw = quantized((96, 128), with_group_size(PRESETS["w4a16"], 64), torch.bfloat16)
    before: list[Callable[[], Tensor]] = [qw.codes.clone, qw.scale.clone]
    kept = [make() for make in before]
    for dtype in (torch.float32, torch.bfloat16):
        linear(torch.randn(40, 128).to(dtype), pack_quantized(qw, dtype, CPU))
    assert torch.equal(qw.codes, kept[0])
    assert torch.equal(qw.scale, kept[1])
