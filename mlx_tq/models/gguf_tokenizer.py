"""The tokenizer of a GGUF file, written as the files of a model folder, which mlx-lm loads."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_tq.errors import UnsupportedModelError
from mlx_tq.models.gguf_file import GgufFile, damaged, short

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_MAX_CHARACTERS = 1024  # of a token; SentencePiece's own limit for a learned one is 16 by default
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_SPACE = "▁"  # what SentencePiece writes for a space
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")  # which llama.cpp looks for if a file names no end of turn

# How text is split before pairs are merged, as in the tokenizer.json of these models and in llama.cpp.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2, _SMOLLM, _LLAMA3, _QWEN2 = "gpt-2", "smollm", "llama-bpe", "qwen2"
_SPLITS = {_LLAMA3: _WORDS % r"\p{N}{1,3}", _QWEN2: _WORDS % r"\p{N}"}
_PRE_TOKENIZERS = (_GPT2, _SMOLLM, _LLAMA3, _QWEN2)


def write_tokenizer(file: GgufFile, folder: Path) -> list[int]:
    """Write tokenizer.json and tokenizer_config.json, and return the ids of the ends of text, a turn and a message."""
    from tokenizers import AddedToken  # comes with transformers
    from tokenizers.processors import TemplateProcessing  # comes with transformers

    vocabulary = _Vocabulary(file)
    tokenizer = _byte_level(vocabulary) if vocabulary.kind == _BYTE_LEVEL else _sentencepiece(vocabulary)
    whole, special = vocabulary.of_type(_USER_DEFINED), vocabulary.of_type(_CONTROL, _UNKNOWN)  # are never split
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    adds_bos = vocabulary.kind == _SENTENCEPIECE or vocabulary.get("pre") == _LLAMA3  # by default
    ids = (  # of the tokens that start and end every text
        vocabulary.id("bos") if vocabulary.get("add_bos_token", adds_bos) else None,
        vocabulary.id("eos") if vocabulary.get("add_eos_token", False) else None,
    )
    if used := [(vocabulary.tokens[id_], id_) for id_ in ids if id_ is not None]:
        bos, eos = ("" if id_ is None else f"{vocabulary.tokens[id_]} " for id_ in ids)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}$A {eos}".strip(), pair=f"{bos}$A {bos}$B {eos}".strip(), special_tokens=used
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[id_] for name, role in _ROLES.items() if (id_ := vocabulary.id(role)) is not None},
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        if not isinstance(template, str):
            raise damaged(file.path, f"its chat template is {short(template)}, not a text")
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ends = {vocabulary.id("eos"), vocabulary.id("eot"), vocabulary.id("eom")}
    if vocabulary.id("eot") is None:
        ends |= {vocabulary.ids[token] for token in vocabulary.of_type(_CONTROL) if token in _TURN_ENDS}
    return sorted(end for end in ends if end is not None)


class _Vocabulary:
    """The tokens of a file, with their types and ids."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.kind = self.get("model")
        if self.kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
            raise UnsupportedModelError(
                f"the model {str(file.path)!r} has an unknown tokenizer {short(self.kind)!r}; valid are "
                f"{_BYTE_LEVEL} (byte level) and {_SENTENCEPIECE} (SentencePiece)."
            )
        self.tokens: list[str] = self.list_of("tokens", str)
        self.types: list[int] = self.list_of("token_type", int)
        tokens, types, rows = self.tokens, self.types, file.tensors["token_embd.weight"].shape[0]
        if not tokens or len(tokens) != len(types):
            raise damaged(file.path, f"it has {len(tokens)} tokens and {len(types)} types of tokens")
        if len(tokens) > rows:
            raise damaged(file.path, f"it has {len(tokens)} tokens and {rows} rows of token_embd.weight")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != len(tokens):
            raise damaged(file.path, "a token occurs twice in its vocabulary")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def list_of(self, key: str, kind: type) -> list[Any]:
        """Return a list of values of one type, which is empty if it is missing."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise damaged(self.file.path, f"its tokenizer.ggml.{key} is {short(values)}, not a list of {kind.__name__}")
        return values

    def id(self, role: str) -> int | None:
        """Return the id of the token that has a role, such as bos, or None."""
        id_ = self.get(f"{role}_token_id")
        if id_ is not None and not (type(id_) is int and 0 <= id_ < len(self.tokens)):
            raise damaged(self.file.path, f"its {role} token is {short(id_)} of {len(self.tokens)}")
        return id_

    def of_type(self, *types: int) -> list[str]:
        return [token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ in types]


def _byte_level(vocabulary: _Vocabulary) -> "Tokenizer":
    """Return GPT-2's tokenizer: bytes are written as letters, and pairs merged in the file's order."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # comes with transformers

    pre = vocabulary.get("pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the model {str(vocabulary.file.path)!r} has an unknown pre-tokenizer {short(pre)!r}: with another one "
            f"it would read other tokens than it was trained on. Valid are {', '.join(_PRE_TOKENIZERS)}."
        )
    merges = [tuple(pair.split(" ", 1)) for pair in vocabulary.list_of("merges", str)]
    if broken := [pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.ids.keys()]:
        raise damaged(
            vocabulary.file.path, f"the merge {short(' '.join(broken[0]))!r} is not of tokens in its vocabulary"
        )
    # Llama 3 keeps a word that is a token, whatever its merges would make of it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre == _LLAMA3))
    if pre == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")] if pre in _SPLITS else []
    if pre == _SMOLLM:
        cuts = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> "Tokenizer":
    """Return SentencePiece's BPE: two tokens merge if their union is a token, that with the highest score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers  # comes with transformers

    scores, ids, normal = vocabulary.list_of("scores", float), vocabulary.ids, vocabulary.of_type(_NORMAL)
    if len(scores) != len(ids):
        raise damaged(vocabulary.file.path, f"it has {len(ids)} tokens and {len(scores)} scores")
    if (longest := max(map(len, normal), default=0)) > _MAX_CHARACTERS:
        raise damaged(vocabulary.file.path, f"a token has {longest:,} characters, above {_MAX_CHARACTERS:,}")
    merges = []
    for token in sorted(normal, key=lambda token: -scores[ids[token]]):
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids]
        merges += sorted(((token[:cut], token[cut:]) for cut in cuts), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unknown = vocabulary.id("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        )
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(spaces), decoders.Sequence(parts)
    return tokenizer
