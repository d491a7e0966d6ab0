"""A small Triton in one process: a stand-in for `triton_python_backend_utils`, and a server for four models.

As strict as the real one where that has bitten: tensors must be contiguous by the server's own arithmetic of
strides, names, types and shapes must be those of config.pbtxt, keyword arguments where it wants them, exactly
one final response, nothing after it. Import this before anything that imports `triton_io`.
"""

import importlib.util
import json
import queue
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

REPOSITORY = Path(__file__).parents[2] / "model_repository"
START, END = 1, 2
_NUMPY = {
    np.dtype(np.float32): "FP32",
    np.dtype(np.int16): "INT16",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int64): "INT64",
    np.dtype(np.uint64): "UINT64",
    np.dtype(np.object_): "STRING",
}
_TORCH = {torch.float32: "FP32", torch.int32: "INT32", torch.int64: "INT64", torch.bfloat16: "BF16"}


class TritonModelException(Exception):  # noqa: N818  Triton's name
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """Holds a numpy array or a torch tensor."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"{name}: a numpy array is needed, not {type(array).__name__}")
        self._name, self.data = name, np.ascontiguousarray(array) if array.ndim else array

    @classmethod
    def from_dlpack(cls, name: str, tensor: torch.Tensor) -> "Tensor":
        expected = 1
        # All axes but the first, and those of size 1 and 0 too: python_backend's pb_tensor.cc.
        for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))[1:]):
            if stride != expected:
                raise TritonModelException(
                    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
                    "C-Order are supported."
                )
            expected *= size
        made = cls.__new__(cls)
        made._name, made.data = name, tensor
        return made

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def datatype(self) -> str:
        return (_NUMPY if isinstance(self.data, np.ndarray) else _TORCH)[self.data.dtype]

    def as_numpy(self) -> np.ndarray:
        if self.datatype == "BF16":
            raise TritonModelException("Tensor dtype used for numpy conversion is not supported: BF16")
        return self.data if isinstance(self.data, np.ndarray) else self.data.numpy()

    def to_dlpack(self) -> Any:
        if self.datatype == "STRING":
            raise TritonModelException("DLPack does not have support for string tensors.")
        tensor = torch.from_numpy(self.data) if isinstance(self.data, np.ndarray) else self.data
        return torch.utils.dlpack.to_dlpack(tensor)


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def output_tensors(self) -> list[Tensor]:
        if self._error is not None:
            raise TritonModelException("no tensors in an error")
        return self._tensors


@dataclass
class ResponseSender:
    """What a decoupled request is answered through; keeps what was sent."""

    responses: "queue.Queue[InferenceResponse | None]" = field(default_factory=queue.Queue)
    cancelled: bool = False
    final: bool = False
    check: Any = lambda response: None
    lock: Any = field(default_factory=threading.Lock)

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        with self.lock:
            if self.final:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            if response is None and not flags:
                raise TritonModelException("a response or the final flag is needed")
            self.final = bool(flags & 1)
            if response is not None:
                self.check(response)
                self.responses.put(response)
            if self.final:
                self.responses.put(None)

    def is_cancelled(self) -> bool:
        assert not self.final, "a question about a request that the server has freed"
        return self.cancelled

    def __iter__(self) -> Iterator[InferenceResponse]:
        """The responses in order, to the final one."""
        while (response := self.responses.get(timeout=60)) is not None:
            yield response


class InferenceRequest:
    server: "FakeServer | None" = None

    def __init__(
        self,
        *,
        model_name: str = "",
        requested_output_names: Sequence[str] = (),
        inputs: Sequence[Tensor] = (),
        request_id: str = "",
        correlation_id: int = 0,
        flags: int = 0,
        trace: Any = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.model_name, self._inputs, self._id = model_name, list(inputs), request_id
        self.outputs, self.correlation_id, self._flags = list(requested_output_names), correlation_id, flags
        self._trace, self._parameters = trace, dict(parameters or {})
        self.sender = ResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def trace(self) -> Any:
        return self._trace

    def flags(self) -> int:
        return self._flags

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def exec(self, *, decoupled: bool = False) -> Iterator[InferenceResponse]:
        assert self.server is not None
        assert decoupled
        return self.server.call(self)


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    page: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # noqa: RUF012  one page, as in Triton

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        self._name, self._kind = name, kind
        assert description

    def Metric(self, *, labels: Mapping[str, str]) -> Any:  # noqa: N802  Triton's name
        key, kind, family = (self._name, tuple(sorted(labels.items()))), self._kind, weakref.ref(self)
        self.page[key] = 0.0

        def change(value: float) -> None:
            _alive(family)
            assert value >= 0 or kind == "gauge"
            MetricFamily.page[key] += value

        def put(value: float) -> None:
            _alive(family)
            assert kind == "gauge"
            MetricFamily.page[key] = value

        return SimpleNamespace(increment=change, set=put)


def _alive(family: "weakref.ref[MetricFamily]") -> None:
    if family() is None:
        raise TritonModelException("the corresponding 'MetricFamily' has been deleted")


class Logger:
    lines: list[tuple[str, str]] = []  # noqa: RUF012  one log

    @classmethod
    def log_info(cls, text: str) -> None:
        cls.lines.append(("info", text))

    @classmethod
    def log_warn(cls, text: str) -> None:
        cls.lines.append(("warning", text))

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.lines.append(("error", text))


def _by_name(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor.name() == name), None)


def install() -> ModuleType:
    """Make `import triton_python_backend_utils` find this."""
    module = sys.modules.setdefault("triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    for each in (
        TritonModelException,
        TritonError,
        Tensor,
        InferenceResponse,
        InferenceRequest,
        MetricFamily,
    ):
        setattr(module, each.__name__, each)
    module.Logger = Logger  # type: ignore[attr-defined]
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    module.get_input_tensor_by_name = lambda request, name: _by_name(request.inputs(), name)  # type: ignore[attr-defined]
    module.get_output_tensor_by_name = (  # type: ignore[attr-defined]
        lambda response, name: _by_name(response.output_tensors(), name)
    )
    return module


def read_config(model: str) -> Any:
    """A model's config.pbtxt, parsed as Triton parses it."""
    return text_format.Parse(
        (REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig()
    )


def load_model_file(model: str) -> ModuleType:
    """A model.py as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"model_{model}", REPOSITORY / model / "1" / "model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def initialize_arguments(model: str, **parameters: str) -> dict[str, str]:
    """What the stub hands to `initialize`, with these parameters in the model's config."""
    config = json_format.MessageToDict(read_config(model), preserving_proto_field_name=True)
    config["parameters"] = {name: {"string_value": value} for name, value in parameters.items()}
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_instance_name": f"{model}_0_0",
    }


class FakeServer:
    """Loads models and routes their calls to each other. `parameters` by model go into their configs."""

    def __init__(self, models: Sequence[str], **parameters: Mapping[str, str]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.traces: list[Any] = []  # of the calls, as they came
        self.configs = {model: read_config(model) for model in models}
        self.models: dict[str, Any] = {}
        self._turns = {model: threading.Lock() for model in models}
        InferenceRequest.server = self
        for model in models:
            instance = load_model_file(model).TritonPythonModel()
            instance.initialize(initialize_arguments(model, **parameters.get(model, {})))
            self.models[model] = instance

    def close(self) -> None:
        for model in self.models.values():
            model.finalize()

    def submit(self, request: InferenceRequest) -> ResponseSender:
        """Check a request as the server would and hand it to its model."""
        config = self.configs[request.model_name]
        self._check(config, config.input, request.inputs())
        needed = {spec.name for spec in config.input if not spec.optional}
        assert needed <= {tensor.name() for tensor in request.inputs()}
        request.sender.check = lambda response: self._check_response(config, response)
        if config.HasField("sequence_batching"):
            flags = {"START": request.flags() & START, "END": request.flags() & END}
            for name, flag in flags.items():
                request.inputs().append(Tensor(name, np.array([[int(bool(flag))]], np.int32)))
            request.inputs().append(Tensor("CORRID", np.array([[request.correlation_id]], np.uint64)))
        self.calls.append((request.model_name, request.flags()))
        self.traces.append(request.trace())
        model = self.models[request.model_name]
        with self._turns[request.model_name]:
            answers = model.execute([request])
        if not config.model_transaction_policy.decoupled:
            (answer,) = answers
            request.sender.send(answer, flags=1)
        return request.sender

    def call(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        """A call between models: only the outputs asked for come back."""
        for response in self.submit(request):
            if not response.has_error():
                kept = [t for t in response.output_tensors() if t.name() in request.outputs]
                response = InferenceResponse(kept)
            yield response

    def song(self, parameters: Mapping[str, Any] | None = None, **fields: np.ndarray) -> ResponseSender:
        """A client's request to `music3`."""
        inputs = [Tensor(name, array) for name, array in fields.items()]
        request = InferenceRequest(
            model_name="music3", inputs=inputs, request_id="a-song", parameters=parameters
        )
        return self.submit(request)

    def _check_response(self, config: Any, response: InferenceResponse) -> None:
        if not response.has_error():
            self._check(config, config.output, response.output_tensors())

    @staticmethod
    def _check(config: Any, specs: Any, tensors: Sequence[Tensor]) -> None:
        by_name = {spec.name: spec for spec in specs}
        for tensor in tensors:
            spec = by_name[tensor.name()]
            datatype = model_config_pb2.DataType.Name(spec.data_type).removeprefix("TYPE_")
            assert tensor.datatype == datatype, f"{tensor.name()} is {tensor.datatype}, not {datatype}"
            shape = tensor.shape()
            if config.max_batch_size:
                assert shape[0] == 1, f"{tensor.name()} has no batch axis: {shape}"
                shape = shape[1:]
            assert len(shape) == len(spec.dims), f"{tensor.name()} is {shape}, not {list(spec.dims)}"
            assert all(want in (-1, have) for want, have in zip(spec.dims, shape, strict=True)), (
                f"{tensor.name()} is {shape}, not {list(spec.dims)}"
            )


def text(value: str | bytes) -> np.ndarray:
    """A STRING field."""
    return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)


def number(value: int, dtype: Any) -> np.ndarray:
    """An integer field."""
    return np.array([value], dtype=dtype)
