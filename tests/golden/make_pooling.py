"""Writes `pooling/golden.json` with transformers on torch (neither is needed to run the tests):

python -m tests.golden.make_pooling

Models that make vectors or scores, each with its files, the shapes of its weights (which `tests/pooled.py` draws) and what
transformers makes of some texts.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.workers.variants import values

HERE = Path(__file__).parent / "pooling"
WORDS = "the a cat dog sat on mat sun is hot cold river fox story about and tell me what when under over many small"
TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "what is the sun? tell me a story about the fox and the river " * 4,
    "hot cold hot",
    "many small foxes, over and under the river; Zebras quack",
]
QUERY = "what is the sun"
DECODER = {
    "vocab_size": 1024,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN3 = {**DECODER, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
ENCODER = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
}
BERT = {**ENCODER, "model_type": "bert", "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0}
ROBERTA = {**ENCODER, "model_type": "xlm-roberta", "vocab_size": 96, "max_position_embeddings": 130, "pad_token_id": 1}
ROBERTA |= {"type_vocab_size": 1, "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
TEMPLATE = (
    "{%- for message in messages -%}{%- if message.role == 'query' -%}<|im_start|>user\nQuery: {{ message.content }}{{ '\\n' }}"
    "{%- elif message.role == 'document' -%}Document: {{ message.content }}<|im_end|>\n<|im_start|>assistant{{ '\\n' }}"
    "{%- endif -%}{%- endfor -%}"
)


def modules(*steps: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the files of sentence-transformers: the kinds and options of the steps after the model."""
    listed: list[dict[str, Any]] = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    files: dict[str, Any] = {}
    for index, (kind, options) in enumerate(steps, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if options:
            files[f"{path}/config.json"] = options
    return {"modules.json": listed, **files}


NORMALIZE = ("Normalize", {})
MODELS: dict[str, dict[str, Any]] = {
    "qwen3 last, normalized": {
        "config": {**QWEN3, "architectures": ["Qwen3ForCausalLM"]},
        "class": AutoModel,  # published by itself, without a head
        "files": modules(("Pooling", {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True}), NORMALIZE),
    },
    "qwen3 mean": {
        "config": {**QWEN3, "architectures": ["Qwen3Model"]},
        "class": AutoModel,
        "files": modules(("Pooling", {"word_embedding_dimension": 48, "pooling_mode": "mean"})),
    },
    "qwen3 two tokens": {
        "config": {**QWEN3, "architectures": ["Qwen3ForCausalLM"]},
        "class": AutoModelForCausalLM,
        "files": {
            **modules(("LogitScore", {"true_token_id": 400, "false_token_id": 300})),
            "chat_template.jinja": TEMPLATE,
        },
    },
    "qwen3 classifier": {
        "config": {**QWEN3, **ONE_LABEL, "architectures": ["Qwen3ForSequenceClassification"]},
        "class": AutoModelForSequenceClassification,
        "files": {"chat_template.jinja": TEMPLATE},
    },
    "bert mean, normalized": {
        "config": {**BERT, "architectures": ["BertModel"]},
        "class": AutoModel,
        "files": {
            **modules(("Pooling", {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True}), NORMALIZE),
            "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
        },
    },
    "bert classifier": {
        "config": {**BERT, **ONE_LABEL, "architectures": ["BertForSequenceClassification"]},
        "class": AutoModelForSequenceClassification,
        "files": {},
    },
    "xlm-roberta first, normalized": {
        "config": {**ROBERTA, "architectures": ["XLMRobertaModel"]},
        "class": AutoModel,
        "files": modules(("Pooling", {"word_embedding_dimension": 48, "pooling_mode_cls_token": True}), NORMALIZE),
    },
    "xlm-roberta classifier": {
        "config": {**ROBERTA, **ONE_LABEL, "architectures": ["XLMRobertaForSequenceClassification"]},
        "class": AutoModelForSequenceClassification,
        "files": {},
    },
}


def word_pieces() -> dict[str, Any]:
    """Return a tokenizer.json of BERT's kind."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *WORDS.split(),
        ".",
        ",",
        ";",
        "?",
        *letters[1:],
        *("##" + x for x in letters),
    ]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return dict(json.loads(tokenizer.to_str()))


def unigrams() -> dict[str, Any]:
    """Return a tokenizer.json of XLM-RoBERTa's kind."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *("\u2581" + word for word in WORDS.split()), "\u2581", *letters, ",", ".", "?"]
    scores = [(piece, 0.0 if index < 4 else -float(index) / 8) for index, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=3))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return dict(json.loads(tokenizer.to_str()))


def tokenizer_of(model_type: str) -> dict[str, Any] | None:
    """Return the tokenizer; None: that of the golden decoders, with an end token after a text, as in the published
    embedders."""
    return {"bert": word_pieces, "xlm-roberta": unigrams}.get(model_type, lambda: None)()


def golden_of(description: dict[str, Any]) -> dict[str, Any]:
    config, files = description["config"], dict(description["files"])
    model = (
        description["class"]
        .from_config(AutoConfig.for_model(**json.loads(json.dumps(config))), attn_implementation="eager")
        .eval()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values(name.lower(), tuple(parameter.shape))))
    model.tie_weights()
    tokenizer = tokenizer_of(config["model_type"])
    own = tokenizer or json.loads((Path(__file__).parent / "qwen3" / "tokenizer.json").read_text())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(own, file)
        file.flush()
        encode = PreTrainedTokenizerFast(tokenizer_file=file.name)
    cases = []
    with torch.no_grad():
        for text in TEXTS:
            if description["class"] is AutoModel:
                inputs = encode(text, return_tensors="pt", return_token_type_ids="bert" in config["model_type"])
                hidden = model(**inputs).last_hidden_state[0].double()
                cases.append({"text": text, "token_ids": inputs["input_ids"][0].tolist(), "vector": pooled(hidden, files)})
                continue
            if tokenizer is None:
                rendered = TEMPLATE_TEXT.format(query=QUERY, document=text)
                inputs = encode(rendered, return_tensors="pt", return_token_type_ids=False)
            else:
                inputs = encode(QUERY, text, return_tensors="pt", return_token_type_ids=True)
            logits = model(**inputs).logits[0].double()
            if description["class"] is AutoModelForCausalLM:
                logits = logits[-1, 400:401] - logits[-1, 300:301]
            case = {"text": text, "token_ids": inputs["input_ids"][0].tolist()}
            types = inputs.get("token_type_ids", torch.zeros(1, 1))[0].tolist()
            case |= {"second_start": types.index(1)} if 1 in types else {}
            cases.append(case | {"logit": logits.item(), "score": torch.sigmoid(logits).item()})
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    files |= {"tokenizer.json": tokenizer} if tokenizer else {}
    return {"config": config, "files": files, "shapes": shapes, "cases": cases}


TEMPLATE_TEXT = "<|im_start|>user\nQuery: {query}\nDocument: {document}<|im_end|>\n<|im_start|>assistant\n"


def pooled(hidden: torch.Tensor, files: dict[str, Any]) -> list[float]:
    options = files["1_Pooling/config.json"]
    if options.get("pooling_mode_lasttoken"):
        vector = hidden[-1]
    elif options.get("pooling_mode_cls_token"):
        vector = hidden[0]
    else:
        vector = hidden.mean(0)
    if "2_Normalize" in json.dumps(files["modules.json"]):
        vector = torch.nn.functional.normalize(vector, dim=0)
    return [round(value, 7) for value in vector.tolist()]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(golden_of(each))}" for name, each in MODELS.items())
    (HERE / "golden.json").write_text("{\n" + lines + "\n}\n")
