"""Block-FP8, the precision in which DeepSeek-V3 is published: e4m3 weights with one float32 scale for each 128 x 128
block.

A weight [rows, columns] becomes two tensors of the checkpoint, `weight` and `weight_scale_inv`:

    scale = amax / 448        [ceil(rows / 128), ceil(columns / 128)], amax: the largest |value| of a block
    weight = value / scale    rounded to e4m3, whose largest number is 448

(arXiv 2412.19437, section 3.3.2; the names are those of its published checkpoint.) FSDP2 cuts a matrix by rows, so a
block may be cut between ranks. Its amax is the largest over those ranks, and then every rank quantizes its own rows:
the bytes are those of quantizing the whole matrix in one place. Experts are stacked along the first axis, and no block
is cut there.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from harness.config.fp8_rules import BLOCK
from harness.config.layers import ConfigError
from harness.config.precision import FP8_BLOCK
from harness.trainer.offload import local
from harness.trainer.rows import RowShards, own_rows
from harness.weights.converter import Converter
from harness.weights.presync_checks import check_shards
from harness.weights.tensor_view import TensorView, span

E4M3: torch.dtype = getattr(torch, FP8_BLOCK.weights)
SCALE: torch.dtype = getattr(torch, FP8_BLOCK.scales)
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST_AMAX = 1e-12
"""A block of zeros needs a scale that can be divided by."""
CHUNK = 1 << 24
"""Elements quantized at a time, each with a few float32 copies."""
IN_A_LAYER = re.compile(r"\.\d+\.")
UNQUANTIZED = {"gate", "router", "shared_expert_gate", "weights_proj", "embed_tokens", "head", "eh_proj"}
"""Modules of a decoder layer whose matrices stay as they are: routers, the indexer's weights, what MTP layers share."""


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Return whether a checkpoint in block-FP8 has this tensor in 8 bits: the matrices of linear layers in decoder
    layers.

    That is what DeepSeek-V3's and Qwen3's published checkpoints quantize. Embeddings, the head, norms, biases and
    routers stay in the model's dtype.
    """
    path, _, last = name.rpartition(".")
    module = path.rpartition(".")[2]
    in_layer = IN_A_LAYER.search(name) is not None
    return last == "weight" and len(shape) == 2 and in_layer and module not in UNQUANTIZED and "norm" not in module


def scale_name(name: str) -> str:
    """Return the name of the scales of a weight."""
    return f"{name}_scale_inv"


def blocks_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of blocks down and across a matrix. Those at its lower and right edge may be smaller."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def block_amax(rows: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Return float32 [blocks that the rows lie in, blocks across]: the largest |value| that these rows have of each
    block.

    rows: float32 [n, columns], those of a matrix from first_row on.
    """
    above = first_row % BLOCK
    padding = (0, -rows.shape[1] % BLOCK, above, -(above + len(rows)) % BLOCK)
    return pad(rows.abs(), padding).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax(dim=(1, 3))


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks with these largest values, float32."""
    # A GPU would multiply by 1 / 448 if this were a number, and differ from the CPU in the last bit.
    return amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, LARGEST)


def quantize_rows(rows: torch.Tensor, scales: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Return e4m3 [n, columns]. rows: float32 [n, columns] from first_row on; scales: those of the whole matrix."""
    block = torch.arange(first_row, first_row + len(rows), device=rows.device) // BLOCK
    return (rows / scales[block].repeat_interleave(BLOCK, dim=1)[:, : rows.shape[1]]).to(E4M3)


def quantize(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 weight and the scales of a whole matrix. dtype: what its values are rounded to first."""
    scales = matrix.new_zeros(blocks_of(matrix.shape), dtype=SCALE)
    for first, rows in _chunks(matrix, dtype):
        _note_largest(scales, rows, first)
    scales = scales_of(scales)
    return torch.cat([quantize_rows(rows, scales, first) for first, rows in _chunks(matrix, dtype)]), scales


def _chunks(matrix: torch.Tensor, dtype: torch.dtype, first_row: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (row within the whole matrix, float32 rows): the rows of a matrix from first_row on, rounded to dtype."""
    step = max(1, CHUNK // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), step):
        yield first_row + start, matrix[start : start + step].to(dtype).to(torch.float32)


def _note_largest(amax: torch.Tensor, rows: torch.Tensor, first_row: int) -> None:
    """Raise the amax of the blocks that these rows lie in to what the rows have."""
    found = block_amax(rows, first_row)
    into = amax[first_row // BLOCK :][: len(found)]
    torch.maximum(into, found, out=into)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """One checkpoint tensor to quantize, where it lies in the trainer's tensor, and where its scales lie."""

    view: TensorView
    """In the dtype that its values are rounded to first."""
    scales: TensorView
    """In the tensor of scales that belongs to the same tensor of the trainer."""

    def own_rows(self, rows: range) -> tuple[slice, int]:
        """Return which of the rows that a rank holds are the matrix's, and which row of the matrix the first one is.

        rows: of the trainer's tensor, each as wide as the matrix.
        """
        first = self.view.offset // self.view.shape[1]
        start = max(rows.start, first)
        stop = max(start, min(rows.stop, first + self.view.shape[0]))
        return slice(start - rows.start, stop - rows.start), start - first


@dataclass(frozen=True, kw_only=True, slots=True)
class _Quantized:
    """A tensor of the trainer whose checkpoint tensors are all quantized."""

    of: str
    stacked: bool
    """Each matrix lies in one row of it, as experts do. Otherwise each consists of rows."""
    matrices: tuple[_Matrix, ...]
    scale_shape: tuple[int, ...]
    """Stacked: [rows of the tensor, scales of one row], sharded as the tensor is. Otherwise [scales], on every rank."""

    @classmethod
    def of_views(cls, of: str, views: Sequence[TensorView], tensor: torch.Tensor) -> "_Quantized":
        """Lay the scales out.

        Raise ConfigError if the matrices are neither rows of the tensor nor each within one row.
        """
        width = RowShards.of(tensor).row_elements
        stacked = [_within_a_row(view, width) for view in views]
        if not all(stacked) and not all(_whole_rows(view, width) for view in views):
            raise ConfigError(
                f"{of}: its checkpoint tensors must be rows of it, or each within one of its rows, to be quantized in blocks;"
                ' use model.rollout_precision = "same" or another Converter.'
            )
        per_row, matrices = dict.fromkeys(range(tensor.shape[0]), 0) if all(stacked) else {0: 0}, []
        size = sum(torch.Size(blocks_of(view.shape)).numel() for view in views) // len(per_row)
        for view in sorted(views, key=lambda view: view.offset):
            shape, row = blocks_of(view.shape), view.offset // width if all(stacked) else 0
            scales = TensorView(
                name=scale_name(view.name),
                of=scale_name(of),
                dtype=SCALE,
                shape=shape,
                stride=(shape[1], 1),
                offset=row * size + per_row[row],
            )
            per_row[row] += torch.Size(shape).numel()
            matrices.append(_Matrix(view=view, scales=scales))
        if set(per_row.values()) != {size}:
            raise ValueError(f"{of}: every row must hold matrices of the same sizes to be quantized in blocks.")
        held = (len(per_row), size) if all(stacked) else (size,)
        return cls(of=of, stacked=all(stacked), matrices=tuple(matrices), scale_shape=held)


class Fp8BlockConverter:
    """Send what another Converter sends, with the matrices of decoder layers in block-FP8."""

    def __init__(self, source: Converter, quantizes: Callable[[str, Sequence[int]], bool] = is_quantized) -> None:
        """source: its layout says to which dtype values are rounded before they are quantized. Raise ValueError.

        quantizes: whether the checkpoint tensor of this name and shape is.
        """
        self.source = source
        tensors, by_tensor = source.tensors(), dict[str, list[TensorView]]()
        for view in source.layout():
            by_tensor.setdefault(view.of, []).append(view)
        self._quantized: dict[str, _Quantized] = {}
        for of, views in by_tensor.items():
            wanted = [quantizes(view.name, view.shape) for view in views]
            if any(wanted):
                if not all(wanted):
                    raise ValueError(f"{of}: some of its checkpoint tensors would be quantized, and some not.")
                self._quantized[of] = _Quantized.of_views(of, views, tensors[of])
        self._layout = tuple(
            each
            for of, views in by_tensor.items()
            for each in (_layout_of(self._quantized[of]) if of in self._quantized else views)
        )
        self._made: dict[str, torch.Tensor] = {}
        """The converted tensors, by name. They are filled anew at each call, so that a pull finds them where they
        were."""

    @property
    def renames_only(self) -> bool:
        return self.source.renames_only  # what is quantized is sent in another dtype

    def layout(self) -> tuple[TensorView, ...]:
        return self._layout

    def scale_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors of scales, by name.

        Those with two axes are sharded by rows as their weight is. Those with one are the same on every rank.
        """
        return {scale_name(of): quantized.scale_shape for of, quantized in self._quantized.items()}

    @torch.no_grad()
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Quantize this rank's rows of every matrix. A collective call: ranks that share a block agree on its scale.

        Raise WeightsRefused on every rank if a shard is missing.
        """
        sources = self.source.tensors()
        check_shards({of: sources[of] for of in self._quantized})  # before the ranks wait for each other
        if not self._made:
            self._allocate(sources)
        self._find_scales(sources)
        for of, quantized in self._quantized.items():
            self._fill(quantized, sources[of])
        found: dict[str, torch.Tensor] = {}
        for of, tensor in sources.items():
            names = (of, scale_name(of)) if of in self._quantized else ()
            found |= {name: self._made[name] for name in names} or {of: tensor}
        return found

    def _allocate(self, sources: Mapping[str, torch.Tensor]) -> None:
        for of, quantized in self._quantized.items():
            tensor, part, shape = sources[of], local(sources[of]), quantized.scale_shape
            self._made[of] = _sharded_as(tensor, torch.empty(part.shape, dtype=E4M3, device=part.device), tensor.shape)
            held = (part.shape[0], *shape[1:]) if quantized.stacked else shape
            scales = torch.empty(held, dtype=SCALE, device=part.device)
            self._made[scale_name(of)] = _sharded_as(tensor, scales, shape) if quantized.stacked else scales

    def _find_scales(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Fill the scales.

        Of matrices that are cut by rows, all ranks' largest values are combined in one collective.
        """
        for of, quantized in self._quantized.items():
            amax, part = local(self._made[scale_name(of)]).zero_(), local(sources[of])
            for matrix in quantized.matrices:
                for of_blocks, rows, first in _parts(quantized, matrix, part, amax, own_rows(sources[of])):
                    for row, chunk in _chunks(rows, matrix.view.dtype, first):
                        _note_largest(of_blocks, chunk, row)
        cut = [of for of, quantized in self._quantized.items() if not quantized.stacked]
        _combine([self._made[scale_name(of)] for of in cut], [sources[of] for of in cut])
        for of in self._quantized:
            scales = local(self._made[scale_name(of)])
            scales.copy_(scales_of(scales))

    def _fill(self, quantized: _Quantized, source: torch.Tensor) -> None:
        """Quantize this rank's part of one tensor."""
        scales, into = local(self._made[scale_name(quantized.of)]), local(self._made[quantized.of])
        for matrix in quantized.matrices:
            whole = own_rows(source)
            parts = _parts(quantized, matrix, local(source), scales, whole)
            targets = _parts(quantized, matrix, into, scales, whole)
            for (of_blocks, rows, first), (_, target, _) in zip(parts, targets, strict=True):
                for row, chunk in _chunks(rows, matrix.view.dtype, first):
                    target[row - first : row - first + len(chunk)].copy_(quantize_rows(chunk, of_blocks, row))


def _combine(amax: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Raise each rank's largest values of blocks, float32 [blocks] of each source, to those of all ranks.

    Collective.
    """
    sharded = next((source for source in sources if isinstance(source, DTensor)), None)
    if sharded is None:
        return
    together = torch.cat(list(amax))
    dist.all_reduce(together, dist.ReduceOp.MAX, group=sharded.device_mesh.get_group())
    for each, agreed in zip(amax, together.split([len(each) for each in amax]), strict=True):
        each.copy_(agreed)


def _layout_of(quantized: _Quantized) -> Iterator[TensorView]:
    for matrix in quantized.matrices:
        yield replace(matrix.view, dtype=E4M3)
        yield matrix.scales


def _parts(
    quantized: _Quantized, matrix: _Matrix, part: torch.Tensor, scales: torch.Tensor, rows: range
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield what a rank holds of a matrix, once or not at all: (scales of the whole matrix, its rows, the first row).

    part, scales: what the rank holds of the trainer's tensor, which is `rows` of it, and of its scales.
    """
    view = matrix.view
    if not quantized.stacked:
        own, first = matrix.own_rows(rows)
        if own.stop > own.start:
            yield matrix.scales.in_memory(scales), part[own], first
        return
    width = quantized.scale_shape[1]
    row = matrix.scales.offset // width
    if row in rows:
        at = (row - rows.start) * part[0].numel() + view.offset % part[0].numel()
        of_blocks = matrix.scales.at((row - rows.start) * width + matrix.scales.offset % width)
        yield of_blocks.in_memory(scales), part.as_strided(view.shape, view.stride, part.storage_offset() + at), 0


def _sharded_as(source: torch.Tensor, part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor of this shape of which the rank holds `part`, sharded by rows if the source is."""
    if not isinstance(source, DTensor):
        return part
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, source.device_mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _within_a_row(view: TensorView, width: int) -> bool:
    first, last = view.offset, view.offset + span(view.shape, view.stride) - 1
    return first // width == last // width and not _whole_rows(view, width)


def _whole_rows(view: TensorView, width: int) -> bool:
    return view.shape[1] == width and view.stride == (width, 1) and view.offset % width == 0
