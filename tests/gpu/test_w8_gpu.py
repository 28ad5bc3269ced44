"""8-bit linears and the kernels that quantize for them, on a real card.

Results are compared with float64 products by relative error; unwritten memory is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quant.artifact.layout import QuantizedWeight, quantize_activations
from quant.artifact.scheme import ActivationScheme, Scheme, WeightScheme, preset
from runtime.kernels.dense import dense_linear
from runtime.kernels.gate import gate
from runtime.kernels.gate.reference import gate_reference
from runtime.kernels.norm import add_rms_norm, rms_norm
from runtime.kernels.norm.reference import rms_norm_reference
from runtime.kernels.quantize import QuantizedActivations, quantize
from runtime.kernels.w8a8 import W8A8Weight, pack_w8a8, w8a8_gate_up, w8a8_linear
from runtime.kernels.w8a16 import W8A16Weight, pack_w8a16, unpack_w8a16, w8a16_linear
from runtime.kernels.workspace import KernelOptions, Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 3e-3
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (1000, 1056), (6144, 4096)]
ROWS = [1, 2, 3, 7, 16, 17, 33, 64, 65, 100, 128, 200, 256, 300, 512, 513, 1025, 4097]
INT8, FP8 = ActivationScheme(), ActivationScheme(kind="float")
SLOW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def options() -> KernelOptions:
    return KernelOptions(workspace=Workspace("cuda"))


@pytest.fixture(scope="module")
def deterministic() -> KernelOptions:
    return KernelOptions(workspace=Workspace("cuda"), deterministic=True)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def check_same_codes(found: QuantizedActivations, expected: QuantizedActivations) -> None:
    """Equal but for values within an ulp of a tie: two kernels may add a row in another order."""
    torch.testing.assert_close(found.scale_T, expected.scale_T, rtol=1e-2, atol=0)
    differ = found.codes_TK.float() != expected.codes_TK.float()
    assert float(differ.float().mean()) < 1e-3


def random_w8a8(shape: tuple[int, int], name: str, options: KernelOptions) -> W8A8Weight:
    scheme = preset(name)
    assert scheme.activations is not None
    codes, scale = quantize_activations(torch.randn(shape, device="cuda"), scheme.activations)
    weight = QuantizedWeight(scheme=scheme, codes=codes, scale=scale)
    return pack_w8a8(weight, torch.bfloat16, torch.device("cuda"), options)


def random_w8a16(
    shape: tuple[int, int],
    group: int | None,
    symmetric: bool,
    dtype: torch.dtype,
    options: KernelOptions,
) -> W8A16Weight:
    strategy: Literal["group", "channel"] = "group" if group else "channel"
    weights = WeightScheme(
        num_bits=8, kind="int", symmetric=symmetric, strategy=strategy, group_size=group
    )
    num_groups = shape[1] // group if group else 1

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(-128, 128, size, dtype=torch.int8, device="cuda")

    weight = QuantizedWeight(
        scheme=Scheme(layout="pack-quantized", weights=weights),
        codes=codes(*shape),
        scale=(torch.rand(shape[0], num_groups, device="cuda") * 1e-3 + 1e-4).to(dtype),
        zero_point=None if symmetric else codes(shape[0], num_groups),
    )
    return pack_w8a16(weight, dtype, torch.device("cuda"), options)


def w8a8_expected(a: QuantizedActivations, weight: W8A8Weight, bias: torch.Tensor) -> torch.Tensor:
    sums = a.codes_TK.double() @ weight.codes_NK.double().T
    return sums * a.scale_T.double()[:, None] * weight.scale_N.double() + bias.double()


@SLOW
@given(
    shape=st.sampled_from(SHAPES),
    rows=st.sampled_from(ROWS),
    name=st.sampled_from(["w8a8", "fp8"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    is_deterministic=st.booleans(),
)
def test_w8a8(
    shape: tuple[int, int],
    rows: int,
    name: str,
    dtype: torch.dtype,
    is_deterministic: bool,
    options: KernelOptions,
    deterministic: KernelOptions,
) -> None:
    weight = random_w8a8(shape, name, deterministic if is_deterministic else options)
    a = quantize(torch.randn(rows, shape[1], device="cuda").to(dtype), weight.activations)
    bias = torch.randn(shape[0], device="cuda").to(dtype)
    out = w8a8_linear(a, weight, bias)
    assert out.dtype == dtype
    assert error(out, w8a8_expected(a, weight, bias)) < TOLERANCE
    assert torch.equal(out, w8a8_linear(a, weight, bias))


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 128, 200])
@pytest.mark.parametrize("shape", [(28672, 4096), (3072, 576)])
def test_gate_up_has_the_bits_of_its_parts(
    shape: tuple[int, int], rows: int, name: str, options: KernelOptions
) -> None:
    weight = random_w8a8(shape, name, options)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16() * 0.1
    a = quantize(x, weight.activations)
    found = w8a8_gate_up(a, weight, "silu", weight.activations)
    if found is None:
        pytest.skip("this tile leaves the activation to a kernel of its own")
    expected = gate(w8a8_linear(a, weight), "silu", weight.activations)
    assert torch.equal(found.scale_T, expected.scale_T)
    assert torch.equal(found.codes_TK.view(torch.uint8), expected.codes_TK.view(torch.uint8))


@SLOW
@given(
    shape=st.sampled_from([shape for shape in SHAPES if shape[1] % 64 == 0]),
    rows=st.sampled_from(ROWS),
    group=st.sampled_from([None, 32, 64]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_w8a16(
    shape: tuple[int, int],
    rows: int,
    group: int | None,
    symmetric: bool,
    dtype: torch.dtype,
    options: KernelOptions,
) -> None:
    weight = random_w8a16(shape, group, symmetric, dtype, options)
    x = torch.randn(rows, shape[1], device="cuda").to(dtype)
    bias = torch.randn(shape[0], device="cuda").to(dtype)
    out = w8a16_linear(x, weight, bias)
    expected = x.double() @ unpack_w8a16(weight).double().T + bias.double()
    assert error(out, expected) < TOLERANCE
    assert torch.equal(out, w8a16_linear(x, weight, bias))


@pytest.mark.parametrize("rows", [2, 17, 64, 300, 1025])
@pytest.mark.parametrize("kind", ["w8a8", "fp8", "w8a16", "dense"])
def test_deterministic_rows_do_not_see_each_other(
    kind: str, rows: int, deterministic: KernelOptions
) -> None:
    shape = (576, 1536)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    if kind == "dense":
        matrix = torch.randn(shape, device="cuda").bfloat16()
        whole = dense_linear(x, matrix, None, deterministic)
        alone = [dense_linear(x[i : i + 1], matrix, None, deterministic) for i in (0, rows - 1)]
    elif kind == "w8a16":
        packed = random_w8a16(shape, None, True, torch.bfloat16, deterministic)
        whole = w8a16_linear(x, packed)
        alone = [w8a16_linear(x[i : i + 1], packed) for i in (0, rows - 1)]
    else:
        weight = random_w8a8(shape, kind, deterministic)
        whole = w8a8_linear(quantize(x, weight.activations), weight)
        alone = [
            w8a8_linear(quantize(x[i : i + 1], weight.activations), weight) for i in (0, rows - 1)
        ]
    assert torch.equal(whole[0], alone[0][0])
    assert torch.equal(whole[-1], alone[1][0])


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("shape", [(1000, 1056), (49152, 576)])
def test_dense(shape: tuple[int, int], rows: int, options: KernelOptions) -> None:
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    matrix = torch.randn(shape, device="cuda").bfloat16()
    bias = torch.randn(shape[0], device="cuda").bfloat16()
    out = dense_linear(x, matrix, bias, options)
    assert error(out, x.double() @ matrix.double().T + bias.double()) < TOLERANCE


@pytest.mark.parametrize("scheme", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 4096), (3, 14336), (2, 32768)])
def test_codes_are_those_of_the_artifact(rows: int, width: int, scheme: ActivationScheme) -> None:
    x = (torch.randn(rows, width, device="cuda") * 3).bfloat16()
    found = quantize(x, scheme)
    codes, scale = quantize_activations(x.cpu(), scheme)
    assert torch.equal(found.scale_T.cpu(), scale[:, 0])
    assert torch.equal(found.codes_TK.cpu().float(), codes.float())


@pytest.mark.parametrize("scheme", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_norms_quantize_what_they_would_have_stored(width: int, scheme: ActivationScheme) -> None:
    x = torch.randn(9, width, device="cuda").bfloat16()
    residual = torch.randn(9, width, device="cuda").bfloat16()
    weight = torch.rand(width, device="cuda") + 0.5
    total, normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert error(normed, rms_norm_reference(total.float(), weight, 1e-5)) < TOLERANCE
    again, fused = add_rms_norm(x, residual, weight, 1e-5, scheme)
    apart = quantize(rms_norm(total, weight, 1e-5), scheme)
    assert torch.equal(again, total)
    assert isinstance(fused, QuantizedActivations)
    check_same_codes(fused, apart)


@pytest.mark.parametrize("scheme", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("width", [1536, 14336, 32768])
def test_gates_quantize_what_they_would_have_stored(width: int, scheme: ActivationScheme) -> None:
    gate_up = torch.randn(3, 2 * width, device="cuda").bfloat16()
    product = gate(gate_up, "silu")
    assert error(product, gate_reference(gate_up, "silu")) < TOLERANCE
    fused, apart = gate(gate_up, "silu", scheme), quantize(product, scheme)
    assert isinstance(fused, QuantizedActivations)
    check_same_codes(fused, apart)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_come_out(bad: float, options: KernelOptions) -> None:
    """An int8 code cannot be NaN; the row's scale says it, and the row is NaN."""
    weight = random_w8a8((64, 576), "w8a8", options)
    x = torch.randn(3, 576, device="cuda").bfloat16()
    x[1, 5] = bad
    out = w8a8_linear(quantize(x, INT8), weight)
    assert out.isfinite().all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_graph_replays_to_the_same_bits(rows: int, options: KernelOptions) -> None:
    """Norm, linear, gate and linear behind each other, launched early (PDL) inside a graph."""
    up, down = (random_w8a8(shape, "w8a8", options) for shape in ((3072, 576), (576, 1536)))
    x, residual = (torch.randn(rows, 576, device="cuda").bfloat16() for _ in range(2))
    weight = torch.rand(576, device="cuda")

    def step() -> torch.Tensor:
        _, a = add_rms_norm(x, residual, weight, 1e-5, INT8)
        assert isinstance(a, QuantizedActivations)
        b = gate(w8a8_linear(a, up), "silu", INT8)
        assert isinstance(b, QuantizedActivations)
        return w8a8_linear(b, down)

    expected = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
