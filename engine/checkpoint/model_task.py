"""Task of a model's head, according to its config.json. Used by `model_config.py`."""

from __future__ import annotations

from typing import Literal

from engine.checkpoint.json_fields import JsonOptions

Task = Literal["generate", "embed", "classify"]
ScoreActivation = Literal["none", "sigmoid"]
_ACTIVATIONS_OF_SCORES: dict[str, ScoreActivation | None] = {"": None, "Identity": "none", "Sigmoid": "sigmoid"}


def task_of(options: JsonOptions) -> Task:
    """Return the task of a checkpoint, by the name of its model class."""
    for name in options.texts("architectures"):
        if name.endswith("ForSequenceClassification"):
            return "classify"
        if name.endswith("Model"):
            return "embed"
    return "generate"


def num_labels_of(options: JsonOptions) -> int:
    """Return the number of labels; the default is two, as in transformers."""
    return len(options.mapping("id2label")) or options.count("num_labels", 2)


def labels_of(options: JsonOptions) -> tuple[str, ...]:
    """Return the names of the labels by their ids; missing ones are `LABEL_0` and so on, as in transformers."""
    names = options.mapping("id2label")
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels_of(options)))


def score_activation_of(options: JsonOptions) -> ScoreActivation | None:
    """Return the activation stored by sentence-transformers as the name of a PyTorch class."""
    name = options.within("sentence_transformers").text("activation_fn", "")
    name = (name or options.text("sbert_ce_default_activation_function", "")).rpartition(".")[2]
    if name not in _ACTIVATIONS_OF_SCORES:
        raise options.error("activation_fn", f"{name!r} is not supported; expected one of {', '.join(_ACTIVATIONS_OF_SCORES)}")
    return _ACTIVATIONS_OF_SCORES[name]
