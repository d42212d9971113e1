"""Rules by which byte-level BPE tokenizers split text before they merge, by the names that GGUF files give them
(`tokenizer.ggml.pre`).

A rule is a list of patterns. Each splits the pieces that the patterns before it left: matches become pieces, and so does what
lies between them. Names and patterns are those of llama.cpp, or of the published tokenizer.json where llama.cpp's regex library
needs another way to write them. Used by `tokenizer.py`.
"""

from __future__ import annotations

import msgspec

DEFAULT_NAME = "default"  # the rule of a file that names none


class PreTokenizer(msgspec.Struct, frozen=True):
    patterns: tuple[str, ...]
    ignores_merges: bool = False  # a piece that is a token is not merged from its parts
    adds_bos: bool = False  # if the file does not say
    adds_sep: bool = False  # behind the text
    is_byte_level: bool = True  # no: bytes without a token are written as <0xXX>
    escapes_spaces: bool = False  # spaces are written as U+2581
    is_nfc: bool = False  # text is composed first


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_BLANKS}"
_CASCADE = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(start: str = r"[^\r\n\p{L}\p{N}]?", end: str = "", without: str = "") -> str:
    """Words whose capitals come first; `without`: a set operation that takes characters out."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    return f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"


_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = rf"{_cased(end=f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_SLASHES}|{_BLANKS}"
_KIMI_K2 = "|".join(
    (r"\p{Han}+", _cased(end=f"{_CONTRACTIONS}?", without=r"&&[^\p{Han}]"), r"\p{N}{1,3}", _PUNCTUATION, _BLANKS)
)
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}")
_DEEPSEEK_LETTERS = (  # letters that have a case
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_PORO = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"
_GROUPED_DIGITS = r"\d{1,3}(?=(?:\d{3})*(?!\d))"  # in threes, counted from the last digit

_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_LLAMA3 = PreTokenizer((_LLAMA3,))
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_PLAIN_GPT4O = PreTokenizer((_GPT4O,))
_WHOLE_LLAMA3 = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_WHOLE_GLM4 = PreTokenizer((_LLAMA3,), ignores_merges=True)
_CLOSED_GPT2 = PreTokenizer((_GPT2,), adds_sep=True)
_LINES_IN_UTF8 = PreTokenizer((_LINES,), is_byte_level=False, escapes_spaces=True)
_PLAIN_DEEPSEEK3 = PreTokenizer(_DEEPSEEK3)
_PLAIN_PORO = PreTokenizer((_PORO,))
_BAILING = PreTokenizer(
    (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_PUNCTUATION}|\s*[\r\n]|\s+(?!\S)|\s+",),
)
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    DEFAULT_NAME: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
        _PLAIN_GPT2,
    ),
    **dict.fromkeys(("modern-bert", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), _PLAIN_GPT2),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe"), _CLOSED_GPT2),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _WHOLE_LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _PLAIN_LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), _WHOLE_GLM4),
    "qwen2": PreTokenizer((_QWEN2,), is_nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), _PLAIN_QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _PLAIN_QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _PLAIN_GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _PLAIN_DEEPSEEK3),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m", "sarvam-moe"), _LINES_IN_UTF8),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _PLAIN_PORO),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "jais-2": PreTokenizer(
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|{_CASCADE}|\s",),
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_BLANKS}"), ignores_merges=True
    ),
    "qwen35": PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",)
    ),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            rf"{_cased(end=f'{_CONTRACTIONS}?')}|\p{{N}}|{_SLASHES}|{_BLANKS}",
        ),
        ignores_merges=True,
    ),
    "falcon": PreTokenizer((_FALCON_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    "viking": PreTokenizer((_PORO, r"\p{N}")),
    "tekken": PreTokenizer((rf"{_cased()}|\p{{N}}|{_SLASHES}|{_BLANKS}",), ignores_merges=True, adds_bos=True),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignores_merges=True),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "seed-coder": PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
    "kimi-k2": PreTokenizer((_KIMI_K2,)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_BLANKS}",)),
    "afmoe": PreTokenizer(
        (
            _GROUPED_DIGITS,
            "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
        )
    ),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "whitespace": PreTokenizer((r"\S+",), is_byte_level=False),
}
