"""A card that is not there: tensors of another device than the CPU, without values, and a list of who waits for it.

torch's fake tensors know shapes, dtypes and a device, and refuse to meet a tensor of the CPU. Autograd refuses devices
whose backend torch was not built with, so the device is one that a backend in Python may claim ("privateuse1" in
torch's words), called `CARD` here; autocast works there as on a GPU. The backend must be there before the process's
first backward pass, and stays: so what uses a card is a process of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers.utils.import_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import domext_ray

CARD = "card"
_OWN_CODE = (str(Path(domext_ray.__file__).parent), str(Path(__file__).parents[1]))
_NARROW = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
_WIDE = ("layer_norm", "softmax.int", "log_softmax.int", "nll_loss", "cross_entropy_loss", "kl_div", "mse_loss")
"""Operations of which autocast makes bf16, and fp32; those that the package calls."""
_PACK = "aten::_pack_padded_sequence"
"""The operation that takes lengths from the host, and leaves batch sizes there."""
_INDEX_PUTS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


@dataclass(frozen=True, order=True)
class Wait:
    """A place of our code that makes the host wait for the card, or sends it something.

    Args:
        file: below the package's folder, or of a test.
        function: that asks, or calls what asks.
        line: of the file.
        what: "to card" and "to host": a copy; "sent": a copy to the card that the host does not wait for; else the
            operation whose result is looked at.
    """

    file: str
    function: str
    line: int
    what: str

    @property
    def place(self) -> tuple[str, str, str]:
        """File, function and what: what stays while lines move."""
        return self.file, self.function, self.what


class MixedDevicesError(RuntimeError):
    """A tensor of the CPU meets one of the card in an operation."""


class _Backend:
    """What torch asks of the module of a backend."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


@cache
def register_card() -> torch.device:
    """Make `CARD` a device of this process, and return it; before the first backward pass."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(CARD, _Backend())
    _register_autocast()
    nn.Module.to = _move_module  # type: ignore[method-assign]
    # `torch.tensor(..., device=CARD)` makes a tensor of the CPU first, and copies it, which is seen here.
    torch._C._set_only_lift_cpu_tensors(True)
    FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()  # type: ignore[method-assign]
    # transformers asks fewer questions of fake tensors than of real ones.
    transformers.utils.import_utils.is_fake_tensor = lambda tensor: False
    return torch.device(CARD, 0)


_libraries: list[Any] = []


def _register_autocast() -> None:
    """Give autocast its operations: a backend in Python has none."""
    key = "AutocastPrivateUse1"
    rest, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL", key)
    _libraries.extend([rest, own])
    rest.fallback(torch.library.fallthrough_kernel, key)
    outside = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def register(name: str, dtype: torch.dtype) -> None:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def run(*args: Any, **kwargs: Any) -> Any:
            def cast(each: Tensor) -> Tensor:
                return each.to(dtype) if each.is_floating_point() and each.dtype is not torch.float64 else each

            with torch._C._ExcludeDispatchKeyGuard(outside):
                args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
                return operation(*args, **kwargs)

        own.impl(name, run)

    for names, dtype in ((_NARROW, torch.bfloat16), (_WIDE, torch.float32)):
        for name in names:
            register(name, dtype)


class Card(TorchDispatchMode):
    """While it is on, `CARD` is a device; `waits` counts who waits for it, and what asks for a value gets a one."""

    def __init__(self) -> None:
        super().__init__()
        register_card()
        self.waits: Counter[Wait] = Counter()
        self._fake = FakeTensorMode()

    def take_waits(self) -> Counter[Wait]:
        """Return what was counted, and begin anew."""
        waits, self.waits = self.waits, Counter()
        return waits

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [
            value for one in (*args, *kwargs.values()) for value in (one if isinstance(one, (list, tuple)) else [one])
        ]
        tensors = [value for value in given if isinstance(value, Tensor)]
        target = kwargs.get("device")
        is_sent = target is not None and torch.device(target).type == CARD
        if not is_sent and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.namespace == "aten":  # torch has not taken it apart before
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            return self._copy(func, name, types, args, kwargs)
        if name == _PACK:
            data, batch_sizes = func(*(_make_ones(arg) if isinstance(arg, FakeTensor) else arg for arg in args))
            return self._send(data), batch_sizes
        self._check_devices(name, tensors)
        if name in _INDEX_PUTS and any(index is not None and index.dtype is torch.bool for index in args[1]):
            self._note("boolean index")
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):  # a single number, or what is sent
            args, kwargs = tree_map_only(Tensor, self._take_fake, (args, kwargs))
        return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation without values; one whose result, or whose shape, depends on values runs on ones."""
        try:
            return self._fake.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self._note(func._schema.name.removeprefix("aten::"))
            return self._guess(func, args, kwargs)

    def _guess(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on ones; tensors that it makes are the card's."""
        real_args, real_kwargs = tree_map_only(FakeTensor, _make_ones, (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        return tree_map_only(Tensor, self._send, func(*real_args, **real_kwargs))

    def _copy(self, func: Any, name: str, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy within the card, to it, or from it."""
        source = args[0] if name == "aten::_to_copy" else args[1]
        to = torch.device(kwargs.get("device") or source.device) if name == "aten::_to_copy" else args[0].device
        if source.device.type == to.type:
            return self._run(func, types, args, kwargs)
        if to.type == CARD:
            is_sent = kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
            self._note("sent" if is_sent else "to card")
            return args[0] if name == "aten::copy_" else self._send(source, kwargs.get("dtype"))
        self._note("to host")
        real = _make_ones(source)
        return func(real, **kwargs) if name == "aten::_to_copy" else func(args[0], real, *args[2:], **kwargs)

    def _check_devices(self, name: str, tensors: list[Tensor]) -> None:
        """Refuse what fake tensors let pass: indices of the CPU, which torch copies to the card at every call."""
        found = {tensor.device.type for tensor in tensors if tensor.dim()}
        if len(found) > 1:
            raise MixedDevicesError(f"{name}: a tensor of the CPU meets one of the card, at {_find_caller()}")

    def _take_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _send(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with self._fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=CARD)

    def _note(self, what: str) -> None:
        self.waits[Wait(*_find_caller(), what)] += 1


def _make_ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _find_caller() -> tuple[str, str, int]:
    """File, function and line of our code that runs; a backward pass has threads of its own, where none does."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for folder in _OWN_CODE:
            if path.startswith(folder) and path != __file__:
                line = frame.f_lineno
                while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension
                    frame = frame.f_back
                return path[len(folder) + 1 :], frame.f_code.co_name, line
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd", "backward", 0


_plain_move = nn.Module.to


def _move_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Move a module to the card: parameters are made anew, for their class changes, and tied ones stay one."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is None or device.type != CARD:
        return _plain_move(module, *args, **kwargs)
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None and id(param) not in moved:
                value = param.detach().to(device, dtype if param.is_floating_point() else None)
                moved[id(param)] = param if value.device == param.device else nn.Parameter(value, param.requires_grad)
            if param is not None:
                part._parameters[name] = moved[id(param)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    return module
