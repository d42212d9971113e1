"""The network of the vision demonstration model, for training: a qwen3_vl (Qwen team 2025) in torch.

Called by `train.py` and `checkpoint.py`; Tokamak itself serves the checkpoint with its own kernels. Parameters are named as in
a Hugging Face checkpoint, without "model.". All samples of a batch have pictures of one size at the same places, so only the
ends of answers are padded, and all share their positions.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.demo.network import DecoderLayer, Shape, rotated
from tools.demo.vision.sizes import MERGE

FRAMES_PER_ROW = 2


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of the encoder, with the names of config.json."""

    hidden_size: int = 64
    intermediate_size: int = 256
    depth: int = 4
    num_heads: int = 4
    patch_size: int = 16
    num_position_embeddings: int = 256
    out_hidden_size: int = 96
    deepstack_visual_indexes: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class SeeingShape:
    """The sizes of both halves; `mrope_section` are pairs of time, height and width."""

    text: Shape
    vision: VisionShape = field(default_factory=VisionShape)
    mrope_section: tuple[int, int, int] = (6, 5, 5)


class EncoderAttention(nn.Module):
    """Attention of each picture's patches to all of them. Initially each of four heads attends to the patch on one side, so
    that small shapes are learned quickly."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    @torch.no_grad()
    def look_around(self) -> None:
        """Return biases that the rotation turns into a preference for a neighbour, in the fastest pair of each axis."""
        biases = self.qkv.bias.view(3, self.num_heads, -1)
        half = biases.shape[-1] // 2
        for head, shifts in zip(range(self.num_heads), itertools.cycle(((0, 1), (0, -1), (1, 0), (-1, 0)))):
            for pair, shift in zip((0, half // 2), shifts, strict=True):
                biases[0, head, pair], biases[0, head, pair + half] = 3.5 * math.cos(shift), 3.5 * math.sin(shift)
                biases[1, head, pair] = 3.5

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`hidden` [pictures, patches, hidden]."""
        pictures, patches, width = hidden.shape
        qkv = self.qkv(hidden).view(pictures, patches, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key = rotated(qkv[0], rotation), rotated(qkv[1], rotation)
        mixed = functional.scaled_dot_product_attention(query, key, qkv[2])
        return self.proj(mixed.transpose(1, 2).reshape(pictures, patches, width))


class EncoderMlp(nn.Module):
    """Feed-forward without a gate."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.linear_fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear_fc2(functional.gelu(self.linear_fc1(hidden), approximate="tanh"))


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden_size, 1e-6)
        self.attn = EncoderAttention(shape)
        self.norm2 = nn.LayerNorm(shape.hidden_size, 1e-6)
        self.mlp = EncoderMlp(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), rotation)
        return hidden + self.mlp(self.norm2(hidden))


class Merger(nn.Module):
    """Merger of squares of patches to the width of the text model. The norm is of each patch, or of all patches of a square."""

    def __init__(self, shape: VisionShape, is_of_square: bool) -> None:
        super().__init__()
        self.merged = shape.hidden_size * MERGE**2
        self.norm = nn.LayerNorm(self.merged if is_of_square else shape.hidden_size, 1e-6)
        self.is_of_square = is_of_square
        self.linear_fc1 = nn.Linear(self.merged, self.merged)
        self.linear_fc2 = nn.Linear(self.merged, shape.out_hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        squares = (hidden.shape[0], -1, self.merged)
        normed = self.norm(hidden.reshape(squares)) if self.is_of_square else self.norm(hidden).reshape(squares)
        return self.linear_fc2(functional.gelu(self.linear_fc1(normed)))


class PatchEmbedding(nn.Module):
    """Convolution over patches without overlap, as a product: `patches` have channel, frame, row, column."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * FRAMES_PER_ROW * shape.patch_size**2, shape.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)


class Encoder(nn.Module):
    """Patches of pictures of one size to features for the text model."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleList(EncoderBlock(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, is_of_square=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, is_of_square=True) for _ in shape.deepstack_visual_indexes)

    def forward(self, patches: Tensor, height: int, width: int) -> tuple[list[Tensor], Tensor]:
        """`patches` [pictures, height * width, 3 * frames * side * side] in the order of squares -> features for the text
        model's input and for each of its first layers, [pictures, squares, hidden], and the hidden states from which they are
        computed [pictures, patches, hidden]."""
        hidden = self.patch_embed(patches) + self._positions(height, width)
        rotation = self._rotation(height, width)
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, rotation)
            if index in self.shape.deepstack_visual_indexes:
                features.append(self.deepstack_merger_list[len(features)](hidden))
        return [self.merger(hidden), *features], hidden

    def _positions(self, height: int, width: int) -> Tensor:
        """Return the table interpolated to the picture, with aligned corners."""
        side = math.isqrt(self.shape.num_position_embeddings)
        table = self.pos_embed.weight.view(side, side, -1)
        rows, columns = _stretched(height, side), _stretched(width, side)
        return by_squares(torch.einsum("hr,rcd,wc->hwd", rows, table, columns))

    def _rotation(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        size = self.shape.hidden_size // self.shape.num_heads // 2
        frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        rows = torch.arange(height, dtype=torch.float32)[:, None, None] * frequencies
        columns = torch.arange(width, dtype=torch.float32)[None, :, None] * frequencies
        angles = torch.cat((rows.expand(-1, width, -1), columns.expand(height, -1, -1)), dim=-1)
        angles = by_squares(angles).repeat(1, 2)
        return angles.cos(), angles.sin()


def _stretched(count: int, side: int) -> Tensor:
    """Return the weights [count, side] of linear interpolation at `count` evenly spaced points from the first to the last of
    `side`."""
    places = torch.linspace(0, side - 1, count)
    return (1 - (places[:, None] - torch.arange(side)).abs()).clamp(min=0)


def by_squares(grid: Tensor) -> Tensor:
    """Return [height, width, ...] as [height * width, ...], the patches of a square one after another."""
    height, width, *rest = grid.shape
    return grid.view(height // MERGE, MERGE, width // MERGE, MERGE, *rest).transpose(1, 2).reshape(height * width, *rest)


class LanguageModel(nn.Module):
    """Qwen3 with positions of three numbers, and additional visual features in the first layers."""

    def __init__(self, shape: SeeingShape) -> None:
        super().__init__()
        self.shape = shape
        text = shape.text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(text) for _ in range(text.num_hidden_layers))
        self.norm = nn.RMSNorm(text.hidden_size, text.rms_norm_eps)

    def forward(self, token_ids: Tensor, seen: Tensor, features: list[Tensor], positions: Tensor, wanted: Tensor) -> Tensor:
        """Return logits at the flat places `wanted`. `token_ids` [rows, tokens]; the places `seen` of every row have
        `features`, each [rows, seen, hidden]; `positions` [3, tokens]."""
        embedded = self.embed_tokens(token_ids)
        features = [feature.to(embedded.dtype) for feature in features]  # may be bfloat16 in training
        hidden = embedded.index_copy(1, seen, features[0])
        rotation = self._rotation(positions)
        mask = torch.ones(token_ids.shape[1], token_ids.shape[1], dtype=torch.bool).tril()
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, mask)
            if index + 1 < len(features):
                hidden = hidden.index_add(1, seen, features[index + 1])
        return self.norm(hidden.flatten(0, 1)[wanted]) @ self.embed_tokens.weight.T

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self.shape.text.head_dim
        frequencies = self.shape.text.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        axes = torch.zeros(size // 2, dtype=torch.long)
        for axis in (1, 2):
            axes[axis : 3 * self.shape.mrope_section[axis] : 3] = axis
        angles = (positions.float()[axes].T * frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


class Qwen3VL(nn.Module):
    """Encoder and text model."""

    def __init__(self, shape: SeeingShape) -> None:
        super().__init__()
        self.shape = shape
        self.visual = Encoder(shape.vision)
        self.language_model = LanguageModel(shape)
        for name, parameter in self.named_parameters():
            if "embed" in name and not name.startswith("visual.patch_embed"):
                nn.init.normal_(parameter, std=0.05)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
                if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
                    parameter.data /= math.sqrt(2 * shape.text.num_hidden_layers)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for block in self.visual.blocks:
            block.attn.look_around()
