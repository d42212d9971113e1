"""Files of a checkpoint, checked against the model to be filled from them.

Used by the loader, at start and at each reload. Reads safetensors (one file, or `model.safetensors.index.json` with shards) in
either layout:

- Hugging Face: linear weights [out, in], names `model.layers.0.self_attn.q_proj.weight`.
- Paddle ("-Paddle" checkpoints of ERNIE): linear weights [in, out], names sometimes `ernie.layers.0...`, sometimes fused:
  `qkv_proj` has q, k and v side by side (with as many kv heads as heads: per head q, k, v), `up_gate_proj` gate and up.

Quantized weights and those of a GGUF file are decoded by `workers/weights/formats`.

The whole checkpoint has one layout, decided by shapes. If every linear weight is square or fits both, these decide, in this
order: the header's `format` ("pd" or "pt"), Paddle's names, and whether transformers wrote config.json.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.files import MappedFile
from engine.checkpoint.gguf.parts import GgufModel
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weight_files import weight_files
from engine.errors import CheckpointError
from ops.modules import Linear
from ops.weight_format import LARGEST, QuantizedWeight, WeightFormat, float32
from shm.blake2 import blake2b
from workers.weights.checksums import Checksums
from workers.weights.declaration import Weights, stored_inputs
from workers.weights.formats.floats import is_finite
from workers.weights.formats.gguf import gguf_tensors
from workers.weights.formats.interleaved import split_experts
from workers.weights.formats.joined_projections import split_projections
from workers.weights.formats.module import DecodedTensor
from workers.weights.formats.quantized import decoded
from workers.weights.formats.tensor import Kept, Tensor
from workers.weights.safetensors import SafetensorsFile, StoredTensor
from workers.weights.stacked import Matrix, matrices

_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^model\.mtp_|^mtp\.")
_UNUSED_BY_BERT = r"^(pooler|cls|lm_head)\.|^embeddings\.(position|token_type)_ids$"
# Alternative names: pattern and replacement. Vision-language models are published under both.
_RENAMES = (
    (re.compile(r"^ernie\."), "model."),
    (re.compile(r"^(bert|roberta)\."), ""),
    (re.compile(r"\bLayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"\bLayerNorm\.beta$"), "LayerNorm.bias"),
    (
        re.compile(r"^(layers|embed_tokens(?:_per_layer)?|norm|per_layer_\w+)\."),
        r"model.\1.",
    ),  # a trunk published alone, as embedding models are
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^language_model\."), ""),  # Llama 4
    (re.compile(r"^model\.(visual|vision_model)\."), r"\1."),
    (re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?"), "vision_tower."),
    (re.compile(r"^vision_tower\.patch_embedder\.position_embedding_table$"), r"\g<0>.weight"),  # Gemma 4
    (re.compile(r"^model\.(multi_modal_projector|embed_vision)\."), r"\1."),
    (re.compile(r"^(model\.)?projector\."), "mlp_AR."),
    (re.compile(r"^resampler_model\."), "model.resampler_model."),
    (re.compile(r"\.(block_sparse_moe|feed_forward)\."), ".mlp."),  # Mixtral, Llama 4
    (re.compile(r"\.mlp\.router\.(layer\.|linear\.)?(weight|bias)$"), r".mlp.gate.\2"),  # Granite, gpt-oss
    (re.compile(r"\.experts\.experts\."), ".experts."),  # gpt-oss as linears
    (re.compile(r"\.mlp\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.mlp\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.shared_experts.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.shared_experts.down_proj."),
    (re.compile(r"\.mlp\.shared_expert\."), ".mlp.shared_experts."),  # Qwen 2
    (re.compile(r"\.self_attn\.sinks$"), ".self_attn.sinks.weight"),
    (re.compile(r"\.(layer_scalar|router\.scale)$"), r".\1.weight"),  # Gemma 4
    (re.compile(r"(\.layers\.\d+)\.experts\."), r"\1.mlp.experts."),
    (re.compile(r"(\.layers\.\d+)\.router\.proj\."), r"\1.mlp.gate."),
    (re.compile(r"(\.experts\.\d+\.|\.mlp\.)w1\."), r"\1gate_proj."),
    (re.compile(r"(\.experts\.\d+\.|\.mlp\.)w2\."), r"\1down_proj."),
    (re.compile(r"(\.experts\.\d+\.|\.mlp\.)w3\."), r"\1up_proj."),
    (re.compile(r"^model\.embedding_norm\."), "model.norm."),  # LFM2
    (re.compile(r"^backbone\."), "model."),  # Mamba-2, Nemotron-H
    (re.compile(r"^model\.embeddings?\.weight$"), "model.embed_tokens.weight"),
    (re.compile(r"^model\.(norm_f|final_layernorm)\."), "model.norm."),
    (re.compile(r"\.mixer\.(in_proj|dt_proj|conv1d|A_log|D|dt_bias|norm|out_proj)\b"), r".mamba.\1"),
    (re.compile(r"\.mixer\.([qkvo]_proj)\."), r".self_attn.\1."),
    (re.compile(r"\.mixer\."), ".mlp."),
    (re.compile(r"^(model\.layers\.\d+\.self_attn)\.out_proj\."), r"\1.o_proj."),
)
_ENCODER = re.compile(r"^(visual|vision_model|vision_tower|multi_modal_projector|embed_vision|mlp_AR|model\.resampler_model)\.")
_UNUSED_BY_ENCODERS = r"^(visual\.vision_model|vision_tower)\.(head\.|embeddings\.packing_position_embedding\.)"
_MERGING = "multi_modal_projector.patch_merger.merging_layer.weight"
_MAX_LISTED = 20


def plain(name: str) -> str:
    """Return the name that the models declare for the stored tensor `name`."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


class _Part(msgspec.Struct, frozen=True):
    """Stored tensor, or some columns of a fused one."""

    tensor: Tensor
    shape: tuple[int, ...]
    columns: np.ndarray | slice | None = None
    is_turned: bool = False

    def of(self, values: np.ndarray) -> np.ndarray:
        own = values if self.columns is None else values[..., self.columns]
        return own.T if self.is_turned else own


class Checkpoint:
    """Files of a checkpoint, checked against the `config` of the model to be filled and the tensors that it declared. Any
    declared tensor can be read by its Hugging Face name, linear weights as [out, in]."""

    def __init__(self, path: Path, config: ModelConfig, weights: Weights) -> None:
        self._path = path
        self._gguf = GgufModel.of_checkpoint(path)
        self._config = config = config.of_same_shape(path, self._gguf)
        self.has_offset_norms = self._gguf is not None  # llama.cpp's converter adds it
        self._files = [] if self._gguf else list(_open_files(path))
        self._has_paddle_names = False
        self._parts = dict(self._name_parts(config))
        self._is_linear = {f"{name}.weight" for linear in weights.all_linears() for name in linear.names}
        self._is_linear |= {f"{part.name}.weight" for part in weights.head_linears}
        self._is_linear |= {f"{part.names[0]}.weight" for part in weights.patch_linears if len(part.stored_shape) == 2}
        self._is_linear -= {f"{embedding.name}.weight" for embedding in weights.embeddings}  # tied: stored as an embedding
        self.is_paddle_layout = self._find_layout(config, weights.all_linears())
        self._check(weights.shapes(), config)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor as float32."""
        part = self._parts[name]
        return self._turned(name, part.of(part.tensor.read()))

    def read_plain(self, name: str) -> np.ndarray:
        """Read a tensor as float32, float16, or uint16 (the bits of bfloat16), as stored, so that large tensors need no
        copy."""
        part = self._parts[name]
        values = part.of(part.tensor.read_plain())
        return self._turned(name, values if not part.shape else self._checked(values, name))  # limits may be infinite

    def read_columns(self, name: str, columns: slice) -> np.ndarray:
        """Return columns of the result of `read_plain`; of a quantized file only these are decoded."""
        part = self._parts[name]
        if isinstance(part.tensor, DecodedTensor) and part.tensor.read_columns and part.columns is None and not part.is_turned:
            return self._checked(part.tensor.read_columns(columns), name)
        return self.read_plain(name)[:, columns]

    def has_rows(self, name: str, is_whole: bool = True) -> bool:
        """Return whether `read_rows` reads only the requested rows. `is_whole`: every column of them is needed."""
        part = self._parts[name]
        is_turned = self.is_paddle_layout and name in self._is_linear
        if isinstance(part.tensor, DecodedTensor):
            return is_whole and part.tensor.read_rows is not None and part.columns is None and not part.is_turned
        return isinstance(part.tensor, StoredTensor) and part.tensor.is_view and part.columns is None and not is_turned

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return rows of the result of `read_plain`."""
        tensor = self._parts[name].tensor
        read = tensor.read_rows if isinstance(tensor, DecodedTensor) else None
        values = read(begin, end) if read else tensor.read_plain()[begin:end]
        return values if is_finite(values) else self.read_plain(name)[begin:end]  # reports everything wrong with it

    def kept(self, name: str) -> Kept:
        return self._parts[name].tensor.kept()

    def read_integers(self, name: str, format: WeightFormat) -> QuantizedWeight:
        """Read integers in a format that represents the result of `kept` exactly."""
        weight = self._parts[name].tensor.read_integers(format)
        self._checked(weight.scales, f"the scales of {name}")
        with np.errstate(over="ignore"):
            products = weight.scales * np.float32(LARGEST[weight.format.kind])
        self._checked(products, f"the largest products of {name}")
        if weight.offsets is not None:
            self._checked(weight.offsets, f"the zero points of {name}")
        return weight

    def release(self) -> None:
        """Stop counting the pages read so far as memory of this process."""
        for file in self._mapped():
            file.data.madvise(mmap.MADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the files were written to while they were read."""
        for file in self._mapped():
            file.check()
            if not file.is_unchanged:
                raise CheckpointError(f"{file.path} changed while it was read; load it again when it is complete")

    def contents(self, checksums: Checksums, on_progress: Callable[[int, int], None]) -> str:
        """Return an identification of the values: their format, and the bytes and checksum of each file."""
        files = self._mapped()
        sums = checksums.of(files, partial(on_progress, 0, sum(file.status.st_size for file in files)))
        self.release()
        found = [(file.path.name, file.status.st_size, checksum) for file, checksum in zip(files, sums, strict=True)]
        return digest_of([repr(self._config.quantization), self.is_paddle_layout, *found])

    def _mapped(self) -> list[MappedFile]:
        return self._gguf.mapped if self._gguf else [file.mapped for file in self._files]

    def _checked(self, values: np.ndarray, name: str) -> np.ndarray:
        """Raise CheckpointError if a value is NaN or infinite."""
        if not is_finite(values):
            wrong = ~np.isfinite(float32(values))
            first = [int(index) for index in np.argwhere(wrong)[0]]
            raise CheckpointError(
                f"{self._path}: {np.count_nonzero(wrong)} of {wrong.size} values of {name} are NaN or infinite, the first at "
                f"{first}; the checkpoint is damaged; download or write it again"
            )
        return values

    def _turned(self, name: str, values: np.ndarray) -> np.ndarray:
        return values.T if self.is_paddle_layout and name in self._is_linear else values

    def _name_parts(self, config: ModelConfig) -> Iterator[tuple[str, _Part]]:
        """Yield stored tensors by Hugging Face name, fused ones as their parts."""
        for name, tensor in self._tensors(config).items():
            self._has_paddle_names |= name.startswith("ernie.")
            plain_name = plain(name)
            if plain_name == _MERGING and config.vision is not None:
                yield plain_name, _Part(tensor, tensor.shape, _by_patch(tensor.shape[-1], config.vision.spatial_merge_size**2))
                continue
            fused = _fused_parts(plain_name, tensor.shape[-1] if tensor.shape else 0, config)
            self._has_paddle_names |= bool(fused)
            for part_name, columns in fused.items():
                yield part_name, _Part(tensor, (*tensor.shape[:-1], len(columns)), columns)
            together = matrices(plain_name, tensor, config)
            for matrix in together:
                yield matrix.name, _part_of(matrix)
            if not fused and not together:
                yield plain_name, _Part(tensor, tensor.shape)

    def _tensors(self, config: ModelConfig) -> Mapping[str, Tensor]:
        """Return all tensors of all files, quantized ones decoded when they are read."""
        if self._gguf:
            return split_projections(gguf_tensors(self._gguf, config), config)
        stored = {name: tensor for file in self._files for name, tensor in file.tensors.items()}
        try:
            metadata = {key: value for file in self._files for key, value in file.metadata.items()}
            tensors: Mapping[str, Tensor] = decoded(stored, config.quantization, metadata) if config.quantization else stored
            tensors = split_projections(tensors, config)
            return split_experts(tensors) if FAMILIES[config.architecture].has_interleaved_experts else tensors
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error

    def _find_layout(self, config: ModelConfig, linears: list[Linear]) -> bool:
        if config.quantization or self._gguf:
            return False  # no quantized format has it
        num_plain, num_transposed = 0, 0
        for linear in linears:
            for name, num_outputs in zip(linear.names, linear.num_outputs, strict=True):
                part = self._parts.get(f"{name}.weight")
                num_inputs = stored_inputs(linear)
                if part is None or f"{name}.weight" not in self._is_linear or num_outputs == num_inputs:
                    continue
                num_plain += part.shape == (num_outputs, num_inputs)
                num_transposed += part.shape == (num_inputs, num_outputs)
        if num_plain != num_transposed:
            return num_transposed > num_plain
        formats = {file.metadata.get("format") for file in self._files} & {"pd", "pt"}
        if len(formats) == 1:
            return formats == {"pd"}
        return self._has_paddle_names or not config.is_transformers

    def _check(self, shapes: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
        problems = []
        for name, shape in shapes.items():
            is_transposed = self.is_paddle_layout and name in self._is_linear
            expected = shape[::-1] if is_transposed else shape
            part = self._parts.get(name)
            if part is None:
                problems.append(f"{name} {list(expected)} is missing")
            elif part.shape != expected:
                problems.append(f"{name} has shape {list(part.shape)}, expected {list(expected)}")
            elif not part.tensor.is_float:
                problems.append(f"{name} is quantized, but config.json has no quantization_config")
        unused = {"lm_head.weight"}  # shared with the embedding, or unused by pooling
        drafts = range(config.num_layers, config.num_layers + config.num_draft_layers)
        harmless = [_HARMLESS.pattern, *(rf"^model\.layers\.{index}\." for index in drafts)]
        if pattern := FAMILIES[config.architecture].unused_tensors:
            harmless.append(pattern)
        if config.position_tables is not None:
            harmless.append(_UNUSED_BY_BERT)
        if config.vision is not None:
            has_encoder = any(map(_ENCODER.search, shapes))
            harmless.append(_UNUSED_BY_ENCODERS if has_encoder else _ENCODER.pattern)
            unread = range(config.vision.depth, config.vision.depth + config.vision.num_unused_layers)
            harmless += [rf"^vision_tower\.transformer\.layers\.{index}\." for index in unread]
        unexpected = [
            name
            for name in self._parts
            if name not in shapes and name not in unused and not any(re.search(pattern, name) for pattern in harmless)
        ]
        problems += [f"{name} {list(self._parts[name].shape)} is unexpected" for name in sorted(unexpected)]
        if problems:
            listed = problems[:_MAX_LISTED]
            if len(problems) > len(listed):
                listed.append(f"and {len(problems) - len(listed)} more")
            raise CheckpointError(
                f"{self._path} does not have the weights of the {config.architecture} model in its config.json: "
                + "; ".join(listed)
            )


def digest_of(value: object) -> str:
    """Return a digest of a JSON value, as 16 hexadecimal digits."""
    return blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def _open_files(path: Path) -> Iterator[SafetensorsFile]:
    paths = weight_files(path)
    if not paths:
        pickles = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth") for each in path.glob(pattern))
        found = f", only {pickles[0]}, a pickle" if pickles else ""
        raise CheckpointError(
            f"{path} has no safetensors file{found}; other formats are not supported: save the model again as safetensors "
            "(--load-format dummy needs no file)"
        )
    return map(SafetensorsFile, paths)


def _part_of(matrix: Matrix) -> _Part:
    if matrix.turned_rows is None:
        return _Part(matrix.tensor, matrix.tensor.shape)
    begin, end = matrix.turned_rows
    return _Part(matrix.tensor, (end - begin, matrix.tensor.shape[0]), slice(begin, end), is_turned=True)


def _by_patch(width: int, num_patches: int) -> np.ndarray:
    """Return the columns of a matrix over some patches in the order of patches, where they are stored by channel."""
    columns: np.ndarray = np.arange(width // num_patches * num_patches).reshape(-1, num_patches).T.ravel()
    return columns


def _fused_parts(name: str, width: int, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the projections within a fused Paddle tensor of `width` columns: name -> its columns."""
    match = re.fullmatch(r"(.*\.)(qkv_proj|up_gate_proj)\.(weight|bias)", name)
    if match is None or match[2] in FAMILIES[config.architecture].fused_names:
        return {}
    prefix, kind, suffix = match.groups()
    columns = np.arange(width)
    if kind == "up_gate_proj":
        gate, up = np.array_split(columns, 2)
        return {f"{prefix}gate_proj.{suffix}": gate, f"{prefix}up_proj.{suffix}": up}
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    if heads == kv_heads and width % (3 * heads) == 0:
        q, k, v = columns.reshape(heads, 3, -1).transpose(1, 0, 2).reshape(3, -1)
    else:
        keys = width * kv_heads // (heads + 2 * kv_heads)
        q, k, v = np.split(columns, [width - 2 * keys, width - keys])
    return {f"{prefix}{part}_proj.{suffix}": indexes for part, indexes in (("q", q), ("k", k), ("v", v))}
