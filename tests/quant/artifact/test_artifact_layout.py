"""What the bits mean, with compressed-tensors as the oracle in both directions, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quant.artifact.dialect import quantization_config
from quant.artifact.errors import IntegrityError, SchemeError
from quant.artifact.layout import (
    QuantizedWeight,
    allowed_dtypes,
    as_bytes,
    dequantize,
    fake_quantize_activations,
    from_tensors,
    min_max_qparams,
    pack,
    quantize,
    quantize_activations,
    round_scale,
    tensor_names,
    tensor_shapes,
    to_tensors,
    unpack,
)
from quant.artifact.scheme import PRESETS, ActivationScheme, Scheme, with_group_size


def asymmetric(scheme: Scheme) -> Scheme:
    assert scheme.weights is not None
    return replace(scheme, weights=replace(scheme.weights, symmetric=False))


PACKED = [
    make(with_group_size(PRESETS[name], group))
    for name in ("w3a16", "w4a16", "w8a16")
    for group in (32, 64, 128, None)
    for make in (lambda scheme: scheme, asymmetric)
]
W4A8 = [PRESETS["w4a8"], with_group_size(PRESETS["w4a8"], 32), PRESETS["w4a8-fp8"]]
SCHEMES = [*PACKED, *W4A8, PRESETS["w8a8"], PRESETS["fp8"]]
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
by_label = {"ids": lambda value: getattr(value, "label", str(value))}

schemes = st.sampled_from(SCHEMES)
scale_dtypes = st.sampled_from(SCALE_DTYPES)
seeds = st.integers(0, 2**31 - 1)


def oracle(scheme: Scheme) -> QuantizationScheme:
    config = quantization_config({"m": scheme})
    return QuantizationScheme(**config["config_groups"]["group_00"])


def random_weight(rows: int, width: int, seed: int) -> Tensor:
    """Normal weights with an outlier, a zero row and a tiny row."""
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    weight[-1, : width // 2] *= 1e-2
    weight[rows // 2, seed % width] = 37.0
    return weight


def width_for(scheme: Scheme, units: int) -> int:
    """A width the scheme allows; odd ones (not multiples of 8) when it is per channel."""
    assert scheme.weights is not None
    return units * scheme.weights.group_size if scheme.weights.group_size else 8 * units + units


def quantized(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    assert scheme.weights is not None
    scale, zero_point = min_max_qparams(weight, scheme.weights, dtype)
    return quantize(weight, scale, zero_point, scheme)


def same(left: Tensor, right: Tensor) -> bool:
    is_alike = left.dtype == right.dtype and left.shape == right.shape
    return is_alike and torch.equal(as_bytes(left), as_bytes(right))


def test_worked_example_of_the_documentation() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(1, 16)
    words = [word & 0xFFFFFFFF for word in pack(codes, 4)[0].tolist()]
    assert words == [0x76543210, 0xFEDCBA98]


def test_three_bits_straddle_words() -> None:
    codes = torch.arange(-4, 4, dtype=torch.int8).repeat(4).reshape(1, 32)
    words = [word & 0xFFFFFFFF for word in pack(codes, 3)[0].tolist()]
    assert words == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]


@given(
    bits=st.sampled_from([3, 4, 8]), rows=st.integers(1, 7), width=st.integers(1, 350), seed=seeds
)
@settings(max_examples=60, deadline=None)
def test_pack_is_the_oracles_and_unpack_its_inverse(
    bits: int, rows: int, width: int, seed: int
) -> None:
    low, generator = -(1 << (bits - 1)), torch.Generator().manual_seed(seed)
    codes = torch.randint(low, -low, (rows, width), generator=generator).to(torch.int8)
    packed = pack(codes, bits)
    assert same(packed, pack_to_int32(codes, bits))
    assert same(unpack(packed, bits, width), codes)
    assert same(unpack_from_int32(packed, bits, codes.shape).contiguous(), codes)


@given(
    scheme=schemes, dtype=scale_dtypes, rows=st.integers(3, 41), units=st.integers(1, 9), s=seeds
)
@settings(max_examples=120, deadline=None)
def test_tensors_and_values_are_the_oracles(
    scheme: Scheme, dtype: torch.dtype, rows: int, units: int, s: int
) -> None:
    weight = random_weight(rows, width_for(scheme, units), s)
    ours = quantized(weight, scheme, dtype)
    stored = to_tensors(ours)
    compressor = BaseCompressor.get_value_from_registry(scheme.layout)
    parameters = {"weight": weight, "weight_scale": ours.scale}
    if ours.zero_point is not None:
        parameters["weight_zero_point"] = ours.zero_point

    theirs = compressor.compress(parameters, oracle(scheme))

    assert stored.keys() == theirs.keys() == set(tensor_names(scheme))
    assert all(same(stored[name], theirs[name]) for name in stored)
    decompressed = compressor.decompress(dict(stored), oracle(scheme))["weight"]
    assert same(dequantize(ours), decompressed.contiguous())
    back = from_tensors(theirs, scheme)
    assert same(back.codes, ours.codes)
    assert same(dequantize(back), dequantize(ours))
    assert {n: tuple(t.shape) for n, t in stored.items()} == tensor_shapes(scheme, ours.shape)
    assert all(t.dtype in allowed_dtypes(scheme, n) for n, t in stored.items())


@given(scheme=schemes, units=st.integers(1, 5), seed=seeds)
@settings(max_examples=60, deadline=None)
def test_min_max_scales_are_the_oracles_rounded_to_bf16(
    scheme: Scheme, units: int, seed: int
) -> None:
    assert scheme.weights is not None
    weight = random_weight(5, width_for(scheme, units), seed)
    scale, zero_point = min_max_qparams(weight, scheme.weights, torch.float32)
    groups = weight.reshape(5, scale.shape[1], -1)
    args = oracle(scheme).weights
    expected, expected_zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)

    assert same(scale, expected.to(torch.bfloat16).float())
    if zero_point is not None:
        # Ours takes the stored scale, so it may sit one step away at a tie.
        assert (zero_point.int() - expected_zero.int()).abs().max() <= 1


@pytest.mark.parametrize("scheme", SCHEMES, **by_label)
@pytest.mark.parametrize("width", [96, 344, 576, 1000, 1001])
def test_odd_widths(scheme: Scheme, width: int) -> None:
    assert scheme.weights is not None
    group = scheme.weights.group_size
    weight = random_weight(6, width, 1)
    if group is not None and width % group:
        with pytest.raises(SchemeError, match=f"group_size {group} does not divide {width}"):
            quantized(weight, scheme, torch.bfloat16)
        return
    qw = quantized(weight, scheme, torch.bfloat16)
    assert same(dequantize(from_tensors(to_tensors(qw), scheme)), dequantize(qw))


@pytest.mark.parametrize("scheme", SCHEMES, **by_label)
@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
def test_zero_groups_stay_exactly_zero(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = torch.zeros(4, 128)
    weight[1] = torch.linspace(-1, 1, 128)
    qw = quantized(weight, scheme, dtype)
    assert bool((torch.isfinite(qw.scale) & (qw.scale > 0)).all())
    assert torch.equal(dequantize(qw)[[0, 2, 3]], torch.zeros(3, 128, dtype=dtype))


HARD_ROWS = {
    "all at least zero": torch.linspace(0, 3, 128),
    "all at most zero": torch.linspace(-3, 0, 128),
    "positive, far from zero": torch.linspace(5, 6, 128),
    "constant": torch.full((128,), 0.7),
    "negative constant": torch.full((128,), -0.7),
    "one outlier": torch.cat([torch.full((127,), 1e-3), torch.tensor([9.0])]),
}


@pytest.mark.parametrize("row", HARD_ROWS.values(), ids=HARD_ROWS.keys())
@pytest.mark.parametrize("scheme", PACKED, **by_label)
def test_zero_points_at_the_edge(scheme: Scheme, row: Tensor) -> None:
    """A23: zero points at either end survive packing, and no element is off by over half a step."""
    assert scheme.weights is not None
    weight = row.repeat(9, 1)
    qw = quantized(weight, scheme, torch.float32)
    back = from_tensors(to_tensors(qw), scheme)
    assert same(back.codes, qw.codes)
    if qw.zero_point is not None:
        assert back.zero_point is not None
        assert same(back.zero_point, qw.zero_point)
    steps = (1 << scheme.weights.num_bits) - 1
    # Half a step, plus what rounding the scale to bf16 (half of 2^-8) shifts the far end by.
    allowed = qw.scale * (0.5 + steps * 2.0**-9)
    error = (dequantize(back) - weight).abs().reshape(9, qw.scale.shape[1], -1).amax(-1)
    assert bool((error <= allowed).all())


def test_asymmetric_codes_reach_both_zero_point_ends() -> None:
    scheme = asymmetric(with_group_size(PRESETS["w4a16"], 128))
    weight = torch.stack([HARD_ROWS["all at least zero"], HARD_ROWS["all at most zero"]])
    qw = quantized(weight, scheme, torch.bfloat16)
    assert qw.zero_point is not None
    assert qw.zero_point.flatten().tolist() == [-8, 7]
    constant = quantized(HARD_ROWS["constant"].repeat(1, 1), scheme, torch.float32)
    assert torch.allclose(dequantize(constant), torch.tensor(0.7), rtol=2.0**-8)


def test_scales_that_do_not_fit_are_refused() -> None:
    """A05: nothing becomes Inf or zero in silence."""
    w4 = PRESETS["w4a16"].weights
    assert w4 is not None
    large, tiny = torch.full((2, 128), 1e6), torch.full((2, 128), 1e-9)
    with pytest.raises(SchemeError, match="overflows float16; use dtype bfloat16"):
        min_max_qparams(large, w4, torch.float16)
    with pytest.raises(SchemeError, match="vanishes in float16"):
        min_max_qparams(tiny, w4, torch.float16)
    with pytest.raises(SchemeError, match="dequantized weights up to 6.*e.04 overflow float16"):
        min_max_qparams(torch.full((2, 128), -65000.0), w4, torch.float16)
    for weight in (large, tiny):
        qw = quantized(weight, PRESETS["w4a16"], torch.bfloat16)
        assert torch.allclose(dequantize(qw).float(), weight, rtol=0.08)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scheme", SCHEMES, **by_label)
def test_nan_and_inf_weights_are_refused(scheme: Scheme, value: float) -> None:
    weight = torch.ones(2, 128)
    weight[1, 3] = value
    with pytest.raises(SchemeError, match="the weight holds NaN or Inf"):
        quantized(weight, scheme, torch.bfloat16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_bad_scales_are_refused(value: float) -> None:
    with pytest.raises(SchemeError, match="NaN, infinite or negative"):
        round_scale(torch.tensor([[value]]), torch.bfloat16)
    with pytest.raises(SchemeError, match=r"not torch\.float64"):
        round_scale(torch.ones(1, 1), torch.float64)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_activations_are_the_oracles(kind: str) -> None:
    act = ActivationScheme(kind="float" if kind == "float" else "int")
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0))
    x[0, 1] = 0
    x[1, 2, 3] = 80.0
    args = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    expected = fake_quantize(x, scale, zero_point, args)

    assert torch.equal(quantize_activations(x, act)[1], scale)
    assert torch.equal(fake_quantize_activations(x, act), expected)
    assert fake_quantize_activations(x.bfloat16(), act).dtype == torch.bfloat16


def test_damaged_tensors_are_named() -> None:
    scheme = asymmetric(PRESETS["w4a16"])
    stored = to_tensors(quantized(random_weight(8, 256, 0), scheme, torch.bfloat16))
    for name in tensor_names(scheme):
        with pytest.raises(IntegrityError, match=f"tensor {name}"):
            from_tensors({k: v for k, v in stored.items() if k != name}, scheme)
    for name in ("weight_packed", "weight_scale", "weight_zero_point"):
        with pytest.raises(IntegrityError, match=f"tensor {name} is .* expected"):
            from_tensors({**stored, name: stored[name][:, :1]}, scheme)
    with pytest.raises(SchemeError, match="zero points"):
        quantize(torch.ones(8, 256), stored["weight_scale"], None, scheme)
