"""A model directory's tensors under module names: found, checked against the config, read one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sluice_engine.model.config import ModelConfig
from sluice_engine.model.dequantise import from_blocks, from_fp4
from sluice_engine.model.errors import BadWeights
from sluice_engine.model.files import weight_files
from sluice_engine.model.names import canonical
from sluice_engine.model.tensors import Stored, TensorSpec, expected_tensors

Progress = Callable[[int, int], None]
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123])\.(weight|weight_scale_inv)$")
_SCALE = ".weight_scale_inv"
# As safetensors' headers name them.
_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_FP8, _PACKED_FP4 = "F8_E4M3", frozenset({"I8", "U8"})
_INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8"})
_STACKED_SCALE = re.compile(r"(gate_up_proj|down_proj)_scale_inv$")


def no_progress(loaded: int, total: int) -> None:
    """Called with bytes of the files read so far and of all. Does nothing."""


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    name: str


class Checkpoint:
    """The files of one directory. Tensors are mapped, and read when asked for."""

    def __init__(self, directory: Path, config: ModelConfig, progress: Progress = no_progress) -> None:
        """Raises BadWeights when names, shapes or dtypes do not match the config: nothing but headers is read."""
        self._config = config
        self._progress = progress
        self._open: dict[Path, Any] = {}
        self._places = self._find(directory)
        self._loaded, self._total = 0, sum(file.stat().st_size for file in {p.file for p in self._places.values()})
        self.specs = {spec.name: spec for spec in expected_tensors(config)}
        self._check_names()
        for name, spec, shape in self._wanted():
            self._check_tensor(name, spec.stored, shape)

    def read(self, name: str) -> Tensor:
        """The tensor in the model's dtype, or float32 or int64 where the model keeps it so. Raises BadWeights for ids
        that name nothing and scales that do not fit."""
        spec = self.specs[name]
        if spec.stored is Stored.INTEGER:
            return self._ids(spec)
        stacked = spec.stored is Stored.EXPERT and name not in self._places
        tensor = self._stack_experts(spec) if stacked else self._dequantised(name)
        return tensor.to(self._dtype(spec))

    def _ids(self, spec: TensorSpec) -> Tensor:
        ids = self._raw(spec.name).to(torch.int64)
        wrong = ((ids < 0) | (ids >= spec.below)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise BadWeights(
                f"tensor {spec.name}: entry {list(at)} is {ids[at].item()}; ids are 0 to {spec.below - 1}"
                + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
            )
        return ids

    def _dtype(self, spec: TensorSpec) -> Any:
        return torch.float32 if spec.stored is Stored.FLOAT else getattr(torch, self._config.dtype)

    def _dequantised(self, name: str) -> Tensor:
        raw = self._raw(name)
        scale_name = _scale_of(name)
        if scale_name not in self._places:
            return raw
        scale = self._raw(scale_name)
        if raw.dtype is not torch.float8_e4m3fn:
            return from_fp4(name, raw, scale)
        assert self._config.quantization is not None  # or it would have been refused
        return from_blocks(name, raw, scale, self._config.quantization.block)

    def _stack_experts(self, spec: TensorSpec) -> Tensor:
        """[experts, ...] of per-expert files: gate rows (w1) before up rows (w3), or w2."""
        base, _, kind = spec.name.rpartition(".")
        experts = []
        for expert in range(spec.shape[0]):
            if kind == "down_proj":
                experts.append(self._dequantised(f"{base}.{expert}.w2.weight"))
                continue
            halves = [self._dequantised(f"{base}.{expert}.{w}.weight") for w in ("w1", "w3")]
            experts.append(torch.cat(halves))
        return torch.stack(experts)

    def _raw(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = self._handle(place.file).get_tensor(place.name)
        self._loaded += tensor.numel() * tensor.dtype.itemsize
        self._progress(min(self._loaded, self._total), self._total)
        return tensor

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except Exception as error:
                raise BadWeights(f"file {file} is no readable safetensors file ({error}); fetch it again") from error
        return self._open[file]

    def _find(self, directory: Path) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        for file in weight_files(directory):
            for name in self._handle(file).keys():  # noqa: SIM118 - not a mapping
                known = canonical(name)
                if known is None:
                    continue
                if known in places:
                    raise BadWeights(f"tensor {name} in {file.name}: is there twice, as {places[known].name} too")
                places[known] = _Place(file, name)
        return places

    def _check_names(self) -> None:
        wanted = {name for name, _, _ in self._wanted()}
        if missing := sorted(wanted - self._places.keys()):
            spec = self.specs.get(missing[0])
            shape = f" of shape {list(spec.shape)}" if spec else ""
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise BadWeights(f"tensor {missing[0]}{shape} is missing{more}; the config asks for it")
        extra = sorted(n for n in self._places.keys() - wanted if not self._is_scale(n, wanted))
        if extra:
            place = self._places[extra[0]]
            found = list(self._handle(place.file).get_slice(place.name).get_shape())
            raise BadWeights(
                f"tensor {place.name} of shape {found} is extra: the config has no place for it"
                + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
            )

    def _wanted(self) -> Iterator[tuple[str, TensorSpec, tuple[int, ...]]]:
        """Name and shape of each tensor that must be there, with the one that it is or is a part of."""
        for spec in self.specs.values():
            if spec.stored is not Stored.EXPERT or spec.name in self._places:
                yield spec.name, spec, spec.shape
                continue
            base, _, kind = spec.name.rpartition(".")
            experts, rows, columns = spec.shape
            names, shape = (("w2",), (rows, columns)) if kind == "down_proj" else (("w1", "w3"), (rows // 2, columns))
            for expert in range(experts):
                yield from ((f"{base}.{expert}.{w}.weight", spec, shape) for w in names)

    def _check_tensor(self, name: str, stored: Stored, shape: tuple[int, ...]) -> None:
        place = self._places[name]
        header = self._handle(place.file).get_slice(place.name)
        dtype, is_scaled = header.get_dtype(), _scale_of(name) in self._places
        if is_scaled and dtype in _PACKED_FP4:
            shape = (*shape[:-1], shape[-1] // 2)
        _check_shape(name, tuple(header.get_shape()), shape)
        if stored is Stored.INTEGER:
            if dtype not in _INTEGERS:
                raise BadWeights(f"tensor {name}: is {dtype}; ids are integers of 8 to 64 bits")
        elif not is_scaled:
            if dtype in _PACKED_FP4 or dtype.startswith("F8"):
                raise BadWeights(f"tensor {name}: is {dtype} but has no scale; the checkpoint is incomplete")
            if dtype not in _PLAIN:
                raise BadWeights(f"tensor {name}: is {dtype}; weights are F32, F16 or BF16, or have a scale")
        elif dtype not in _PACKED_FP4:
            if dtype != _FP8:
                raise BadWeights(f"tensor {name}: is {dtype} with a scale; only e4m3 and packed e2m1 are implemented")
            if self._config.quantization is None:
                problem = "is quantised, but config.json has no quantization_config; restore it"
                raise BadWeights(f"tensor {name}: {problem}")

    def _is_scale(self, name: str, wanted: set[str]) -> bool:
        if name.endswith(_SCALE):
            return name.removesuffix("_scale_inv") in wanted
        return bool(_STACKED_SCALE.search(name)) and name.removesuffix("_scale_inv") in wanted


def _scale_of(name: str) -> str:
    return name + "_scale_inv"


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise BadWeights(f"tensor {name}: has shape {list(found)}, the config asks for {list(wanted)}")
