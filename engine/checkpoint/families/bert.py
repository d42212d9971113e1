"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020): bidirectional encoders with
learned position embeddings and without a KV cache.
"""

from __future__ import annotations

from engine.checkpoint.families.family import Biases, Family, PositionTables
from engine.checkpoint.json_fields import JsonOptions


class Bert(Family):
    name = "bert"
    class_names: tuple[str, ...] = ("BertModel", "BertForSequenceClassification")
    model = "workers.models.bert:Bert"
    pooled_kind = "cls"
    has_rotary = False
    norm_epsilon_name = "layer_norm_eps"
    rms_norm_eps = 1e-12
    activation = "gelu"
    has_deep_head = False  # a dense layer of the head itself, instead of the model's pooler

    def biases(self, options: JsonOptions) -> Biases:
        return Biases(True, True, True)

    def first_position(self, options: JsonOptions) -> int:
        """Return the row of a text's first token in the table of positions."""
        return 0

    def position_tables(self, options: JsonOptions) -> PositionTables:
        kind = options.text("position_embedding_type", "absolute")
        if kind != "absolute":
            raise options.error("position_embedding_type", f"{kind!r} is not supported; expected 'absolute'")
        if options.flag("is_decoder", False):
            raise options.error("is_decoder", "true is not supported; only encoders are")
        num_rows, first = options.count("max_position_embeddings"), self.first_position(options)
        if first >= num_rows:
            raise options.error("max_position_embeddings", f"{num_rows} leaves no room after pad_token_id {first - 1}")
        return PositionTables(num_rows, first, options.count("type_vocab_size", 2), self.has_deep_head)

    def is_bidirectional(self, options: JsonOptions) -> bool:
        return True


class Roberta(Bert):
    name = "xlm-roberta"
    other_names = ("roberta",)
    class_names = (
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
        "RobertaModel",
        "RobertaForSequenceClassification",
    )
    rms_norm_eps = 1e-5
    has_deep_head = True

    def first_position(self, options: JsonOptions) -> int:
        """Return the first row after those of padding."""
        return options.count("pad_token_id", 1, least=0) + 1
