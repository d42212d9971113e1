"""`config.json` of a checkpoint as one checked, frozen value.

Read at the start and kept for the run (`record.py`), for every process that needs the model's shape: the supervisor (arena
size), the tokenizer (limits, end tokens) and the workers (everything). Imports no Paddle. Both styles of the file are
supported: `rope_theta` with `rope_scaling`, and `rope_parameters`; `torch_dtype` and `dtype`. An unknown value is an error and
never ignored, because answers would be wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engine.checkpoint.activations import read_activation
from engine.checkpoint.families import CLASS_NAMES, MODEL_TYPES, POOLED_NAMES
from engine.checkpoint.families.experts import ExpertsConfig
from engine.checkpoint.families.family import MAX_LAYERS, Family, Latents, LayerShape, Multipliers, PositionTables
from engine.checkpoint.families.recurrence import Recurrence
from engine.checkpoint.json_fields import JsonOptions, read_json
from engine.checkpoint.model_task import ScoreActivation, Task, labels_of, num_labels_of, score_activation_of, task_of
from engine.checkpoint.quantization_config import QuantizationConfig
from engine.checkpoint.recurrent_layer import RecurrentLayer
from engine.checkpoint.rope_config import RopeConfig, read_ropes
from engine.checkpoint.tensor_names import tensor_names
from engine.checkpoint.unknown_options import unknown_options
from engine.checkpoint.vision_config import VisionConfig
from engine.errors import CheckpointError

if TYPE_CHECKING:
    from engine.checkpoint.gguf.parts import GgufModel

GENERATION_CONFIG = "generation_config.json"
_CHECKPOINT_DTYPES = ("float32", "float16", "bfloat16", "float64")


class ModelConfig(msgspec.Struct, frozen=True):
    """A model's shape and options, the same names for every architecture."""

    architecture: str  # a name in `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int  # with latents: the rotated part
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str  # "silu" | "gelu" | "gelu_tanh" | "quick_gelu" | "relu" | "relu2" | "tanh" | "sigmoid"
    tie_word_embeddings: bool
    has_head_norm: bool  # each query and key head is normalized
    has_qkv_bias: bool
    has_output_bias: bool  # bias of the attention output projection
    has_mlp_bias: bool
    has_head_bias: bool
    sliding_windows: tuple[int, ...]  # per layer, keys that a query sees (itself included); 0: all before it
    has_chunks: bool  # windows begin at multiples of their size
    rope: RopeConfig
    other_rope: RopeConfig | None  # of some layers; None: `rope` is for all
    other_rope_layers: tuple[int, ...]
    multipliers: Multipliers
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the stored weights, if the file names it
    is_transformers: bool  # version of Hugging Face transformers, if the file names it
    quantization: QuantizationConfig | None = None  # of the stored weights
    experts: ExpertsConfig | None = None  # in layers without an MLP
    latents: Latents | None = None
    recurrence: Recurrence | None = None  # of layers without attention
    layer_shapes: tuple[LayerShape, ...] = ()  # empty: all layers are alike
    recurrent_layers: tuple[RecurrentLayer | None, ...] = ()  # of each layer; empty: no layer is recurrent
    attention_layers: tuple[int, ...] | None = None  # None: all layers
    layer_inputs_dim: int = 0  # width of each layer's own embedding of a token; 0: layers have none
    same_inputs: tuple[tuple[int, int], ...] = ()  # tokens that have the embeddings of another one: both
    causal_layers: tuple[int, ...] = ()  # causal also within pictures that other layers see whole
    num_draft_layers: int = 0  # stored after the last layer; loaded only if requested
    vision: VisionConfig | None = None  # vision-language models only
    vision_experts: ExpertsConfig | None = None  # experts of media tokens, stored after those of text
    task: Task = "generate"  # task of the head
    num_labels: int = 0  # labels of a classification head
    labels: tuple[str, ...] = ()  # their names
    score_activation: ScoreActivation | None = None  # activation of scores; None: by the number of labels
    pooled_kind: Literal["last", "mean", "cls"] = "last"  # default pooling of hidden states
    is_bidirectional: bool = False  # tokens attend to the whole prompt, which is computed in one step; windows are two-sided
    position_tables: PositionTables | None = None  # encoders only
    lacks_encoder: bool = False  # the model takes pictures, but its file has only the text model (GGUF), or that alone is read
    unknown_options: dict[str, Any] = {}  # of config.json: read by nothing, may change what is computed
    matryoshka_dimensions: tuple[int, ...] = ()  # dimensions to which embeddings may be truncated; empty: unknown

    @staticmethod
    def read(path: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`, if present) of the checkpoint directory `path`."""
        directory = Path(path)
        options = JsonOptions(read_json(directory / "config.json"), directory / "config.json")
        generation_path = directory / GENERATION_CONFIG
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return _read(options, JsonOptions(generation, generation_path))

    @staticmethod
    def of_gguf(file: GgufModel) -> ModelConfig:
        """Return the configuration in the file itself, without end tokens, which belong to the tokenizer."""
        from engine.checkpoint.gguf.convert import model_options  # only needed for GGUF files

        return _read(JsonOptions(model_options(file), file.path), JsonOptions({}, file.path))

    def layer_shape(self, index: int) -> LayerShape:
        """Return the sizes of layer `index`."""
        if self.layer_shapes:
            return self.layer_shapes[index]
        return LayerShape(self.num_kv_heads, self.head_dim, self.intermediate_size, index)

    @property
    def largest_head_dim(self) -> int:
        return max([self.head_dim, *(shape.head_dim for shape in self.layer_shapes)])

    @property
    def largest_intermediate_size(self) -> int:
        return max([self.intermediate_size, *(shape.intermediate_size for shape in self.layer_shapes)])

    def shape_differences(self, other: ModelConfig) -> list[str]:
        """Return `name: ours, theirs` for every option except the file format and the end tokens: they must be equal when
        weights are replaced in place."""
        harmless = (
            "task",
            "labels",
            "score_activation",
            "matryoshka_dimensions",
            "lacks_encoder",
            "dtype",
            "is_transformers",
            "eos_token_ids",
            "quantization",
            "num_draft_layers",
            "recurrent_layers",  # follow from `recurrence`
        )
        names = [name for name in self.__struct_fields__ if name not in harmless]
        return [
            f"{name}: {getattr(self, name)}, {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]

    def of_same_shape(self, path: Path, gguf: GgufModel | None = None) -> ModelConfig:
        """Return the current configuration of the checkpoint at `path`. Raises CheckpointError if its shape differs. `gguf`:
        the file from which it was converted, which may be newer than its config.json."""
        found = ModelConfig.of_gguf(gguf) if gguf else ModelConfig.read(path)
        differences = self.shape_differences(found)
        if differences:
            raise CheckpointError(
                f"{path} is not the model that the engine was started with ({'; '.join(differences)}); start a new engine for "
                "it"
            )
        return found


def _read(options: JsonOptions, generation: JsonOptions) -> ModelConfig:
    """Read a configuration. Raises CheckpointError, also for values that are valid one by one but not together."""
    try:
        return _model_config(options, generation)
    except ArithmeticError as error:
        raise CheckpointError(f"{options.path}: its values do not fit together: {error}; download it again") from error


def _model_config(options: JsonOptions, generation: JsonOptions) -> ModelConfig:
    """Read a configuration. In vision models the text model's options are within `text_config`, or beside the rest."""
    family = _family(options)
    stored = options.within("text_config") if options.values.get("text_config") else options
    others = {name: stored.values.get(other) for other, name in family.other_option_names.items()}
    text = stored.with_defaults({name: value for name, value in others.items() if value is not None})
    if defaults := family.text_defaults(text):
        text = text.with_defaults(defaults)
    biases = family.biases(text)
    num_heads = text.count("num_attention_heads")
    num_kv_heads = text.count("num_key_value_heads", _default_kv_heads(text, family, num_heads))
    if num_heads % num_kv_heads:
        raise text.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    latents = family.latents(text)
    head_dim = latents.rotary_dim if latents else _head_dim(text, family, num_heads)
    tables = family.position_tables(text)
    max_positions = text.count("max_position_embeddings") - (tables.first_position if tables else 0)
    num_layers = text.count("num_hidden_layers", most=MAX_LAYERS)
    found = [each.text("dtype", each.text("torch_dtype", "")) for each in (options, text)]
    dtype = next(filter(None, found), "float32")
    if dtype not in _CHECKPOINT_DTYPES:
        raise options.error("dtype", f"{dtype!r} is not supported; expected one of {', '.join(_CHECKPOINT_DTYPES)}")
    eos_token_ids = (each.token_ids("eos_token_id") for each in (text, options, generation))
    vision = family.vision(options, text)
    if vision and vision.out_hidden_size != text.count("hidden_size"):
        raise options.error(
            "vision_config.out_hidden_size",
            f"{vision.out_hidden_size} should be the text model's hidden_size, {text.count('hidden_size')}",
        )
    is_bidirectional = family.is_bidirectional(text)
    task = task_of(options)
    if is_bidirectional and task == "generate":
        task = "embed"  # its head is not used
    multipliers = family.multipliers(text)
    if task != "generate":  # factor and cap are those of the vocabulary's head
        multipliers = msgspec.structs.replace(multipliers, logits=1.0, softcap_of_logits=0.0)
    is_checked = tables is None and not family.has_training_options
    windows = family.sliding_windows(text, num_layers)
    shapes = family.layer_shapes(text, num_layers)
    dims = [shape.head_dim for shape in shapes] or [head_dim] * num_layers
    if is_bidirectional and tables is None:
        windows = _two_sided(windows, text, family, is_plain=latents is None and vision is None and not shapes)
    ropes = read_ropes(text, family, dims, max_positions, windows)
    recurrence = family.recurrence(text, num_layers)
    return ModelConfig(
        architecture=family.name,
        vocab_size=text.count("vocab_size"),
        hidden_size=text.count("hidden_size"),
        intermediate_size=text.count(family.mlp_width_name),
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=text.number(family.norm_epsilon_name, family.rms_norm_eps, least=0),
        activation=read_activation(text, family.activation_name, family.activation),
        tie_word_embeddings=_ties_word_embeddings(options, text, family),
        has_head_norm=family.head_norm(text),
        has_qkv_bias=biases.qkv,
        has_output_bias=biases.output,
        has_mlp_bias=biases.mlp,
        has_head_bias=biases.head,
        sliding_windows=windows,
        has_chunks=family.has_chunks(text),
        rope=ropes.rope,
        other_rope=ropes.other,
        other_rope_layers=ropes.other_layers,
        multipliers=multipliers,
        eos_token_ids=tuple(dict.fromkeys(token_id for ids in eos_token_ids for token_id in ids if token_id >= 0)),
        dtype=dtype,
        is_transformers=any("transformers_version" in each.values or "torch_dtype" in each.values for each in (options, text)),
        quantization=_quantization(options),
        experts=_used(family.experts(text, num_layers)),
        latents=latents,
        recurrence=recurrence,
        recurrent_layers=recurrence.layer_by_layer(num_layers) if recurrence else (),
        attention_layers=family.attention_layers(text, num_layers, recurrence),
        layer_shapes=shapes,
        layer_inputs_dim=family.layer_inputs_dim(text, num_layers),
        same_inputs=family.same_inputs(options, text),
        causal_layers=family.causal_layers(text, windows),
        num_draft_layers=family.num_draft_layers(text),
        vision=vision,
        vision_experts=_used(family.vision_experts(text, num_layers)),
        task=task,
        num_labels=num_labels_of(options) if task == "classify" else 0,
        labels=labels_of(options) if task == "classify" else (),
        score_activation=score_activation_of(options),
        pooled_kind=family.pooled_kind,
        is_bidirectional=is_bidirectional,
        position_tables=tables,
        matryoshka_dimensions=options.counts("matryoshka_dimensions", ()),
        lacks_encoder=options.flag("lacks_encoder", bool(family.has_unread_encoder and options.values.get("vision_config"))),
        # the last field: all others are read by now
        unknown_options=unknown_options(options, stored, family) if is_checked else {},
    )


def _two_sided(windows: tuple[int, ...], text: JsonOptions, family: Family, *, is_plain: bool) -> tuple[int, ...]:
    """Return the windows of a decoder that attends both ways. Raises CheckpointError if its attention is no plain one."""
    is_causal = text.flag("is_causal", True)
    if not is_plain or family.has_chunks(text):
        name, value = ("use_bidirectional_attention", "true") if is_causal else ("is_causal", "false")
        raise text.error(name, f"{value} is not supported for {family.name}")
    if is_causal:
        return windows
    return tuple(window + 1 if window else 0 for window in windows)  # transformers counts the last key, too


def _used(experts: ExpertsConfig | None) -> ExpertsConfig | None:
    """Return the experts if a layer has them. A family reads their options even if none does, so that they count as read."""
    return experts if experts is not None and experts.sparse_layers else None


def _ties_word_embeddings(options: JsonOptions, text: JsonOptions, family: Family) -> bool:
    """Read `tie_word_embeddings`. If both objects have it, it is correct only in the inner one in older files, and only in the
    outer one in newer files, which transformers 5 writes. If the outer one leaves it out, transformers uses that object's
    default, but does not tie to a head that is stored."""
    is_nested = bool(options.values.get("text_config"))
    if is_nested and family.outer_ties_word_embeddings is not None and "tie_word_embeddings" not in options.values:
        text.flag("tie_word_embeddings", False)
        names = tensor_names(options.path.parent)
        return not any("lm_head." in name for name in names) if names else family.outer_ties_word_embeddings
    if not family.can_tie_word_embeddings:
        text.flag("tie_word_embeddings", False)
        return False
    said = [each.flag("tie_word_embeddings", False) for each in (options, text) if "tie_word_embeddings" in each.values]
    is_new = options.text("transformers_version", "").partition(".")[0] not in ("", "0", "1", "2", "3", "4")
    if is_new and "tie_word_embeddings" in options.values:
        return said[0]
    return any(said) if said else family.ties_word_embeddings


def _quantization(options: JsonOptions) -> QuantizationConfig | None:
    """Read the quantization from config.json, or from the separate file of older checkpoints of GPTQ and of NVIDIA's Model
    Optimizer."""
    if options.values.get("quantization_config"):
        return QuantizationConfig.read(options.within("quantization_config"))
    path = options.path.with_name("quantize_config.json")
    if path.is_file():
        return QuantizationConfig.read(JsonOptions({"quant_method": "gptq", **read_json(path)}, path))
    path = options.path.with_name("hf_quant_config.json")
    if path.is_file():
        modelopt = JsonOptions(read_json(path), path).within("quantization")
        if modelopt.values.get("quant_algo"):
            return QuantizationConfig.read(JsonOptions({"quant_method": "modelopt", **modelopt.values}, path))
    return None


def _family(options: JsonOptions) -> Family:
    names = options.texts("architectures")
    for name in names:
        found = CLASS_NAMES.get(name) or POOLED_NAMES.get(name)
        if found is not None:
            return found
    model_type = options.text("model_type", "")
    if not names and model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    what = ", ".join(names) or model_type or "nothing"
    raise options.error("architectures", f"{what} is not supported; expected one of {', '.join(CLASS_NAMES)}")


def _default_kv_heads(text: JsonOptions, family: Family, num_heads: int) -> int:
    """Return the default of the family, in models that it fits. In others it cannot be meant: every head has its own keys."""
    count = _default(text, "num_key_value_heads", family.num_kv_heads)
    return count if count and num_heads % count == 0 else num_heads


def _default(options: JsonOptions, name: str, value: int) -> int:
    """Return the default of an option that is left out; 0 if it is null."""
    return 0 if name in options.values else value


def _head_dim(options: JsonOptions, family: Family, num_heads: int) -> int:
    hidden_size = options.count("hidden_size")
    head_dim = options.count("head_dim", _default(options, "head_dim", family.head_dim))
    if not head_dim:
        if hidden_size % num_heads:
            raise options.error("head_dim", f"is missing, and hidden_size {hidden_size} is not a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    return head_dim
