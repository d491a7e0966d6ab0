"""Precisions by name: what they store, what they refuse, and that they leave the process as it was."""

import contextlib

import pytest
import torch

from python_backend_models.engine import precision
from python_backend_models.engine.acoustic import FlowEngine, FlowResult, FlowWindow, VocoderEngine
from python_backend_models.engine.precision import ATTENTION, PRECISIONS, resolve, resolve_attention
from tests.acoustic_models import make_acoustic

CPU = torch.device("cpu")
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def switches() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def test_names() -> None:
    assert PRECISIONS == ("float32", "tf32", "bfloat16", "float16")
    assert resolve("float32", CPU).weight_dtype == torch.float32
    assert {name: resolve(name, CPU).weight_dtype for name in LOW} == LOW


def test_a_device_without_the_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError('"addmm_impl" not implemented for Half')

    monkeypatch.setattr(precision, "_probe", failing)
    with pytest.raises(ValueError, match=r"float16 is not available on the cpu.*addmm_impl"):
        resolve("float16", CPU)
    assert resolve("float32", CPU).name == "float32"


def test_switches_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_has_tf32", lambda _device: True)
    chosen = resolve("tf32", torch.device("cuda"))
    before = switches()
    with contextlib.suppress(KeyError), chosen.active():
        assert switches() == ("tf32", "tf32", False, False)
        raise KeyError
    assert switches() == before
    with precision.Precision("float32", torch.device("cuda")).active():
        assert switches() == ("ieee", "ieee", False, False)
    with resolve("float32", CPU).active():
        assert switches() == before


@pytest.mark.parametrize("name", LOW)
def test_only_products_and_convolutions_are_stored_low(name: str) -> None:
    networks = make_acoustic(seed=31)
    flow = FlowEngine(networks.encoder, networks.transformer, device="cpu", precision=name, steps=2)
    VocoderEngine(networks.vocoder, device="cpu", precision=name)
    low = {
        parameter_name
        for parameter_name, parameter in networks.transformer.named_parameters()
        if parameter.dtype == LOW[name]
    }
    parts = (
        "attn.to_qkv.weight",
        "attn.to_out.0.weight",
        "ff_in.weight",
        "ff_in.bias",
        "ff_out.weight",
        "ff_out.bias",
    )
    assert low == {f"transformer_blocks.{block}.{part}" for block in range(2) for part in parts}
    assert all(parameter.dtype == torch.float32 for parameter in networks.encoder.parameters())
    assert all(
        (parameter.dtype == torch.float32) == parameter_name.endswith("alpha")
        for parameter_name, parameter in networks.vocoder.named_parameters()
    )
    (result,) = flow.solve([FlowWindow(torch.zeros(4, 32), 0, 0, None)])
    assert isinstance(result, FlowResult)
    assert result.latent.dtype == result.carry.condition.dtype == torch.float32


HEADS = {"tokens": 20, "heads": 2, "head_dim": 8}


def test_auto_takes_the_first_kernel_that_runs() -> None:
    chosen = resolve_attention("auto", resolve("float32", CPU), **HEADS)
    assert chosen.name == "flash"
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(1))
    with chosen.active():
        got = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    weights = torch.softmax(q.double() @ k.double().mT / 8**0.5, dim=-1)
    torch.testing.assert_close(got.double(), weights @ v.double(), atol=1e-6, rtol=0)


def test_a_kernel_the_device_lacks_is_refused_by_name() -> None:
    assert ATTENTION == ("auto", "flash", "cudnn", "efficient", "math")
    assert resolve_attention("math", resolve("bfloat16", CPU), **HEADS).name == "math"
    with pytest.raises(ValueError, match="attention cudnn is not available in float32 on the cpu"):
        resolve_attention("cudnn", resolve("float32", CPU), **HEADS)
    with pytest.raises(ValueError, match="'flash4': one of auto, flash"):
        resolve_attention("flash4", resolve("float32", CPU), **HEADS)
    networks = make_acoustic(seed=31)
    with pytest.raises(ValueError, match="attention cudnn"):
        FlowEngine(networks.encoder, networks.transformer, device="cpu", attention="cudnn")


def test_the_log_says_which_kernel_runs(caplog: pytest.LogCaptureFixture) -> None:
    networks = make_acoustic(seed=31)
    with caplog.at_level("INFO"):
        FlowEngine(networks.encoder, networks.transformer, device="cpu", precision="bfloat16")
    assert "flow in bfloat16 with flash attention on cpu" in caplog.text
