"""A checkpoint's vision encoder as one checked, frozen value: part of `ModelConfig`.

Built by the families; used by every process that counts an image's tokens (tokenizer, media, scheduler) and by the encoder
itself. A **patch** is a square of pixels, in `temporal_patch_size` frames; squares of patches are **merged** into one token.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path

import msgspec

from engine.checkpoint.activations import read_activation
from engine.checkpoint.files import read_file
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.processor_files import IMAGE_PROCESSOR, PROCESSOR, picture_options
from engine.errors import CheckpointError

_MAX_LAYERS = 4096
_MAX_SIDE = 1024  # pixels of a patch, patches of a merged square


class PixelScale(msgspec.Struct, frozen=True):
    """Scale of a pixel's 0 to 255 before the encoder: (pixel * factor - mean) / deviation, for red, green and blue."""

    factor: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]


class MediaTokens(msgspec.Struct, frozen=True):
    """Token ids of media placeholders in prompts. `video` is -1 if the model takes no video."""

    image: int
    video: int
    start: int
    end: int
    video_start: int
    video_end: int
    row_break: int = -1  # between two rows of an image's tokens; -1: none


class VisionConfig(msgspec.Struct, frozen=True):
    """Shape and options of a vision encoder, the same names for every architecture."""

    kind: str  # the family's name, which selects the encoder
    tokens: MediaTokens
    pixels: PixelScale
    depth: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    out_hidden_size: int  # width of features: that of the text model
    patch_size: int  # pixels
    temporal_patch_size: int  # frames
    spatial_merge_size: int  # patches
    temporal_merge_size: int  # temporal rows of patches
    norm_eps: float
    text_norm_eps: float  # of norms that are like the text model's
    rope_theta: float  # 0: positions are not rotated
    tokens_per_second: int = 0  # positions on the time axis; 0: the times of a video's frames are in the text
    window_size: int = 0  # pixels; 0: every layer attends to the whole image
    full_attention_layers: tuple[int, ...] = ()  # with windows: the layers that attend to the whole image
    position_table_side: int = 0  # side of the square of learned positions; 0: none
    deepstack_layers: tuple[int, ...] = ()  # their outputs are added to the text model's first layers
    num_places: int = 0  # learned positions of columns, and as many of rows; 0: none
    has_alternating_frequencies: bool = False  # rows rotate by every other frequency, columns by those between
    rotates_halves: bool = False  # columns rotate the first half of a head, rows the second, with pairs within each
    has_limits: bool = False  # inputs and outputs of linears have stored limits
    is_standardized: bool = False  # merged patches are standardized with stored numbers
    sees_whole_units: bool = False  # tokens of a unit attend to all of it
    projector_activation: str = "gelu"
    has_projector_bias: bool = True
    num_unused_layers: int = 0  # stored after those that compute features

    @property
    def image_token_id(self) -> int:
        return self.tokens.image

    @property
    def video_token_id(self) -> int:
        return self.tokens.video

    @property
    def start_token_id(self) -> int:
        return self.tokens.start

    @property
    def end_token_id(self) -> int:
        return self.tokens.end

    @property
    def frames_per_unit(self) -> int:
        """Frames of a video that the encoder computes together; an image is one frame."""
        return self.temporal_patch_size * self.temporal_merge_size

    @property
    def num_passes(self) -> int:
        """Number of passes over a unit's rows. The keys of a layer must be complete before attention, so a pass goes from the
        attention of one layer to the keys of the next; the last pass computes features, and one more those of two frames."""
        return self.depth + 1 + (self.temporal_merge_size > 1)

    @property
    def merged_pixels(self) -> int:
        """Side of the pixels of a token: an image's sides are multiples of it."""
        return self.patch_size * self.spatial_merge_size

    @property
    def square_side(self) -> int:
        """Side of the pixels that the square of learned positions covers."""
        return self.position_table_side * self.patch_size

    @property
    def feature_width(self) -> int:
        """Elements of a token's row in the encoder arena: its features, then those of each deepstack layer."""
        return self.out_hidden_size * (1 + len(self.deepstack_layers))

    def num_tokens_of(self, height: int, width: int) -> int:
        """Return the tokens of a unit of `height` x `width` patches, with those between its rows."""
        num_breaks = height // self.spatial_merge_size - 1 if self.tokens.row_break >= 0 else 0
        return self.num_features_of(height, width) + num_breaks

    def num_features_of(self, height: int, width: int) -> int:
        """Return the tokens of a unit that read features."""
        return (height // self.spatial_merge_size) * (width // self.spatial_merge_size)


def read_pixel_scale(directory: Path, *, is_optional: bool = False) -> PixelScale:
    """Read the pixel scale from the checkpoint's processor files. Raises CheckpointError if there are none, unless they are
    `is_optional`: then pixels become 0 to 1 by default."""
    files = {name: read_file(directory / name) for name in (PROCESSOR, IMAGE_PROCESSOR) if (directory / name).is_file()}
    options = picture_options(files, directory)
    if not files and not is_optional:
        raise CheckpointError(f"{options.path} is missing; it defines how images are resized")
    means, deviations = [0.0] * 3, [1.0] * 3
    if options.flag("do_normalize", not is_optional):
        means, deviations = list(options.numbers("image_mean")), list(options.numbers("image_std"))
    if len(means) != 3 or len(deviations) != 3 or min(deviations) <= 0:
        raise options.error("image_mean", f"{means} and image_std {deviations} should be 3 numbers each, image_std positive")
    factor = options.number("rescale_factor", 1 / 255) if options.flag("do_rescale", True) else 1.0
    return PixelScale(factor, tuple(means), tuple(deviations))


def read_media_tokens(options: JsonOptions, vocab_size: int, start: str, end: str, *, takes_video: bool = True) -> MediaTokens:
    """Read the token ids, by transformers' names; `start` and `end` are the names for an image. A model without them cannot
    distinguish media from text."""
    image = _token_id(options, "image_token_id", vocab_size)
    video = _token_id(options, "video_token_id", vocab_size) if takes_video else -1
    first, last = _token_id(options, start, vocab_size), _token_id(options, end, vocab_size)
    video_start = _token_id(options, "video_start_token_id", vocab_size, first)
    return MediaTokens(image, video, first, last, video_start, _token_id(options, "video_end_token_id", vocab_size, last))


def _token_id(options: JsonOptions, name: str, vocab_size: int, default: int | None = None) -> int:
    return options.count(name, default, least=0, most=vocab_size - 1)


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `VisionConfig` that each family reads by itself."""

    activation: str  # default
    patch_size: int = 14  # default
    out_hidden_size: int
    num_kv_heads: int = 0  # 0: those of queries
    head_dim: int = 0  # 0: hidden_size / heads
    temporal_patch_size: int
    text_norm_eps: float = 1e-6
    intermediate_size: int = 0  # default; 0: it must be in the checkpoint
    temporal_merge_size: int = 1
    norm_eps: float = 1e-6
    tokens_per_second: int = 0
    window_size: int = 0
    full_attention_layers: tuple[int, ...] = ()
    num_positions: int = 0  # learned positions of a square
    has_rotary: bool = True
    num_places: int = 0
    has_alternating_frequencies: bool = False
    rotates_halves: bool = False
    has_limits: bool = False
    is_standardized: bool = False
    sees_whole_units: bool = False
    projector_activation: str = "gelu"
    has_projector_bias: bool = True
    num_unused_layers: int = 0
    deepstack_layers: tuple[int, ...] = ()


def read_vision(kind: str, options: JsonOptions, tokens: MediaTokens, pixels: PixelScale, spec: VisionSpec) -> VisionConfig:
    """Read what all families have in common from `vision_config`."""
    depth = options.count(_first(options, "depth", "num_hidden_layers"), most=_MAX_LAYERS)
    hidden_size = options.count("hidden_size")
    num_heads = options.count(_first(options, "num_heads", "num_attention_heads"))
    multiple = 4 if spec.has_rotary else 2
    what = ", for rotary embeddings in two dimensions" if spec.has_rotary else ""
    head_dim = spec.head_dim or hidden_size // num_heads
    if spec.head_dim % multiple:
        raise options.error("head_dim", f"{head_dim} should be a multiple of {multiple}{what}")
    if not spec.head_dim and (hidden_size % num_heads or head_dim % multiple):
        raise options.error("hidden_size", f"{hidden_size} should be {num_heads} heads of a multiple of {multiple}{what}")
    if spec.num_kv_heads and num_heads % spec.num_kv_heads:
        raise options.error("num_key_value_heads", f"{spec.num_kv_heads} does not divide num_attention_heads {num_heads}")
    channels = options.count(_first(options, "in_channels", "in_chans", "num_channels"), 3)
    if channels != 3:
        raise options.error("in_channels", f"{channels} is not supported; expected 3 (RGB)")
    rope = options.within("rope_parameters")
    rope_type = rope.text("rope_type", "axial")
    if rope_type not in ("axial", "default"):  # the second is its name in older files
        raise rope.error("rope_type", f"{rope_type!r} is not supported; expected 'axial'")
    patch_size = options.count("patch_size", spec.patch_size, most=_MAX_SIDE)
    merge_size = options.count("spatial_merge_size", 2, most=_MAX_SIDE)
    if spec.window_size and spec.window_size < patch_size * merge_size:
        raise options.error(
            "window_size", f"{spec.window_size} pixels are less than the side of a token, {patch_size * merge_size}"
        )
    for name, layers in (
        ("fullatt_block_indexes", spec.full_attention_layers),
        ("deepstack_visual_indexes", spec.deepstack_layers),
    ):
        if list(layers) != sorted({*layers}) or not all(0 <= layer < depth for layer in layers):
            raise options.error(name, f"{list(layers)} should be layers in ascending order, 0 to {depth - 1}")
    side = isqrt(spec.num_positions)
    if side * side != spec.num_positions:
        raise options.error("num_position_embeddings", f"{spec.num_positions} should be a square number")
    return VisionConfig(
        kind=kind,
        tokens=tokens,
        pixels=pixels,
        depth=depth,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=spec.num_kv_heads or num_heads,
        head_dim=head_dim,
        intermediate_size=options.count("intermediate_size", spec.intermediate_size or None),
        activation=read_activation(options, "hidden_act", spec.activation),
        out_hidden_size=spec.out_hidden_size,
        patch_size=patch_size,
        temporal_patch_size=spec.temporal_patch_size,
        spatial_merge_size=merge_size,
        temporal_merge_size=spec.temporal_merge_size,
        norm_eps=spec.norm_eps,
        text_norm_eps=spec.text_norm_eps,
        rope_theta=rope.number("rope_theta", options.number("rope_theta", 10_000.0, above=0), above=0)
        if spec.has_rotary
        else 0.0,
        tokens_per_second=spec.tokens_per_second,
        window_size=spec.window_size,
        full_attention_layers=spec.full_attention_layers,
        position_table_side=side,
        deepstack_layers=spec.deepstack_layers,
        num_places=spec.num_places,
        has_alternating_frequencies=spec.has_alternating_frequencies,
        rotates_halves=spec.rotates_halves,
        has_limits=spec.has_limits,
        is_standardized=spec.is_standardized,
        sees_whole_units=spec.sees_whole_units,
        projector_activation=spec.projector_activation,
        has_projector_bias=spec.has_projector_bias,
        num_unused_layers=spec.num_unused_layers,
    )


def layer_list(options: JsonOptions, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = options.values.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or not all(type(index) is int for index in value):
        raise options.error(name, f"{value!r} should be a list of layers")
    return tuple(value)


def _first(options: JsonOptions, *names: str) -> str:
    """Return the first name that the option has in the file; the values under all names must be equal."""
    given = [name for name in names if options.values.get(name) is not None]
    return given[0] if given else names[0]
