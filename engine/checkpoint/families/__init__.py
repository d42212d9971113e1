"""The supported families of models: the meaning of their config.json and GGUF files, and the class that computes them.

`FAMILIES` is the one list of them. A new model is a file here with a `Family`, its line below, and a file in `workers/models/`
if no existing class computes it. Read `family.py` first.
"""

from __future__ import annotations

from engine.checkpoint.families.bamba import Bamba
from engine.checkpoint.families.bert import Bert, Roberta
from engine.checkpoint.families.cohere import Cohere, Cohere2
from engine.checkpoint.families.deepseek_v2 import DeepseekV2
from engine.checkpoint.families.deepseek_v3 import DeepseekV3
from engine.checkpoint.families.ernie4_5 import Ernie4_5
from engine.checkpoint.families.ernie4_5_moe import Ernie4_5Moe
from engine.checkpoint.families.ernie4_5_vl_moe import Ernie4_5VLMoe
from engine.checkpoint.families.exaone4 import Exaone4
from engine.checkpoint.families.falcon_h1 import FalconH1
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.gemma2 import Gemma2
from engine.checkpoint.families.gemma3 import Gemma3
from engine.checkpoint.families.gemma3_vision import Gemma3Vision
from engine.checkpoint.families.gemma4 import Gemma4
from engine.checkpoint.families.gemma4_vision import Gemma4Vision
from engine.checkpoint.families.glm4 import Glm4
from engine.checkpoint.families.glm4_moe import Glm4Moe, Glm4MoeLite
from engine.checkpoint.families.gpt_oss import GptOss
from engine.checkpoint.families.granite import Granite
from engine.checkpoint.families.granitemoe import GraniteMoe, GraniteMoeShared
from engine.checkpoint.families.granitemoehybrid import GraniteMoeHybrid
from engine.checkpoint.families.hunyuan_v1_dense import HunyuanV1Dense
from engine.checkpoint.families.kimi_linear import KimiLinear
from engine.checkpoint.families.lfm2 import Lfm2, Lfm2Moe
from engine.checkpoint.families.llama import Llama
from engine.checkpoint.families.llama4 import Llama4
from engine.checkpoint.families.mamba2 import Mamba2
from engine.checkpoint.families.media_rules import MediaRules
from engine.checkpoint.families.minimax_m2 import MiniMaxM2
from engine.checkpoint.families.ministral3 import Ministral3
from engine.checkpoint.families.mistral import Mistral
from engine.checkpoint.families.mistral3 import Mistral3, Pixtral
from engine.checkpoint.families.mixtral import Mixtral
from engine.checkpoint.families.nemotron_h import NemotronH
from engine.checkpoint.families.olmo2 import Olmo2, Olmo3
from engine.checkpoint.families.paddleocr_vl import PaddleOcrVL
from engine.checkpoint.families.phi3 import Phi3
from engine.checkpoint.families.qwen2 import Qwen2
from engine.checkpoint.families.qwen2_5_vl import Qwen2_5VL
from engine.checkpoint.families.qwen2_moe import Qwen2Moe
from engine.checkpoint.families.qwen2_vl import Qwen2VL
from engine.checkpoint.families.qwen3 import Qwen3
from engine.checkpoint.families.qwen3_5 import Qwen3_5, Qwen3_5Moe, Qwen3_5MoeVL, Qwen3_5VL
from engine.checkpoint.families.qwen3_moe import Qwen3Moe
from engine.checkpoint.families.qwen3_next import Qwen3Next
from engine.checkpoint.families.qwen3_vl import Qwen3VL
from engine.checkpoint.families.qwen3_vl_moe import Qwen3VLMoe
from engine.checkpoint.families.seed_oss import SeedOss
from engine.checkpoint.families.smollm3 import SmolLM3
from engine.checkpoint.families.starcoder2 import Starcoder2

_TEXT = (
    Llama(),
    Qwen2(),
    Qwen3(),
    Ernie4_5(),
    Qwen3Moe(),
    Ernie4_5Moe(),
    DeepseekV2(),
    DeepseekV3(),
    Mistral(),
    Mixtral(),
    Phi3(),
    SmolLM3(),
    Granite(),
    SeedOss(),
    Glm4(),
    Glm4Moe(),
    Glm4MoeLite(),
    Qwen3Next(),
    Qwen3_5(),
    Qwen3_5Moe(),
    Lfm2(),
    Lfm2Moe(),
    KimiLinear(),
    Exaone4(),
    Olmo2(),
    Olmo3(),
    MiniMaxM2(),
    Gemma2(),
    Gemma3(),
    Gemma4(),
    Qwen2Moe(),
    Cohere(),
    Cohere2(),
    HunyuanV1Dense(),
    Starcoder2(),
    GraniteMoe(),
    GraniteMoeShared(),
    GraniteMoeHybrid(),
    NemotronH(),
    FalconH1(),
    Bamba(),
    Mamba2(),
    Ministral3(),
    Llama4(),
    GptOss(),
)
_VISION = (
    Qwen2VL(),
    Qwen2_5VL(),
    Qwen3VL(),
    Qwen3VLMoe(),
    Qwen3_5VL(),
    Qwen3_5MoeVL(),
    Ernie4_5VLMoe(),
    PaddleOcrVL(),
    Gemma3Vision(),
    Gemma4Vision(),
    Mistral3(),
    Pixtral(),
)
_ENCODERS = (Bert(), Roberta())
_POOLED = ("Model", "ForSequenceClassification")  # other class names with the trunk of a ...ForCausalLM
FAMILIES: dict[str, Family] = {}
MODEL_TYPES: dict[str, Family] = {}
CLASS_NAMES: dict[str, Family] = {}
GGUF_NAMES: dict[str, Family] = {}  # of several families of one name the first
GGUF_NAMES_WITH_PICTURES: dict[str, Family] = {}  # likewise, of models that take pictures: the family of their text model
POOLED_NAMES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family, also one of a plugin. Raises ValueError if a name is taken."""
    names = (family.name, *vars(type(family)).get("other_names", ()))  # not those of a base class
    for name in names:
        if name in MODEL_TYPES:
            raise ValueError(f"the model type {name} is already that of the family {MODEL_TYPES[name].name}")
    for name in family.class_names:
        if name in CLASS_NAMES:
            raise ValueError(f"the class {name} is already that of the family {CLASS_NAMES[name].name}")
    FAMILIES[family.name] = family
    MODEL_TYPES.update(dict.fromkeys(names, family))
    CLASS_NAMES.update(dict.fromkeys(family.class_names, family))
    if family.media is not None or family in _ENCODERS:
        return
    if family.gguf_name is not None:
        GGUF_NAMES.setdefault(family.gguf_name or family.name, family)
    own_names = vars(type(family))
    GGUF_NAMES_WITH_PICTURES.update(dict.fromkeys(own_names.get("gguf_names_with_pictures", ()), family))
    trunks = (*(name.removesuffix("ForCausalLM") for name in family.class_names), *own_names.get("other_trunk_names", ()))
    POOLED_NAMES.update({trunk + ending: family for trunk in trunks for ending in _POOLED})


for _family in (*_TEXT, *_VISION, *_ENCODERS):
    register(_family)


def media_rules(kind: str) -> MediaRules:
    """Return the rules of a family that takes media (`VisionConfig.kind`)."""
    rules = FAMILIES[kind].media
    assert rules is not None, f"{kind} takes no media"
    return rules
