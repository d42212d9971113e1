"""The families of models that are served: what each one's config.json and GGUF files mean, and which class computes it.

`FAMILIES` is the one list of them. A new model is a file here with a `Family`, its line below, and a file in
`workers/models/` where no class that is there computes it. Read `family.py` first.
"""

from __future__ import annotations

from engine.checkpoint.families.ernie4_5 import Ernie4_5
from engine.checkpoint.families.ernie4_5_moe import Ernie4_5Moe
from engine.checkpoint.families.family import Family
from engine.checkpoint.families.llama import Llama
from engine.checkpoint.families.qwen2 import Qwen2
from engine.checkpoint.families.qwen3 import Qwen3
from engine.checkpoint.families.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Llama(), Qwen2(), Qwen3(), Ernie4_5(), Qwen3Moe(), Ernie4_5Moe())
}
GGUF_NAMES: dict[str, Family] = {family.gguf_name or family.name: family for family in FAMILIES.values()}
CLASS_NAMES: dict[str, Family] = {name: family for family in FAMILIES.values() for name in family.class_names}
