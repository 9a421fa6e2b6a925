"""Tokenizers of GGUF files, against a loop over the file's merges and against SentencePiece itself."""

import copy
import unicodedata
from io import BytesIO
from itertools import pairwise

import pytest
import regex
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers.convert_slow_tokenizer import bytes_to_unicode

import mlx_tq
from mlx_tq.cli.inputs import load_text
from mlx_tq.errors import ConfigError
from mlx_tq.server.prompt_builder import PromptBuilder

from .gguf_files import vocabulary, write_gguf

TEXTS = (
    "The capital of France is Paris, isn't it?  Yes.\n\n   \tIt'S 1234567 people; don't WE'LL\r\n x=3.5\n",
    "naïve Größe e\u0301 你好 🤖 \u00a0 end   ",
    "<|im_start|>user\nhi<|im_end|>\n",
    " leading, and    many     spaces\n\n\n\n",
    load_text()[:2000],
)
# llama.cpp's regular expressions, src/llama-vocab.cpp; the first cuts, the second cuts what is left.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (WORDS % r"\p{N}{1,3}",),
    "qwen2": (WORDS % r"\p{N}",),
}


def pieces(texts, pattern):
    """Yield the matches of a pattern and the texts between them."""
    for text in texts:
        end = 0
        for found in regex.finditer(pattern, text):
            yield from filter(None, (text[end : found.start()], found[0]))
            end = found.end()
        if text[end:]:
            yield text[end:]


def merged(word, ranks):
    """Merge pairs, that with the lowest rank first."""
    parts = list(word)
    while pairs := [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]:
        _, i = min(pairs)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]
    return parts


def by_loop(text, pre, said):
    ids = {token: id for id, token in enumerate(said["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(said["tokenizer.ggml.merges"])}
    special = [token for token, kind in zip(ids, said["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    letters, found = bytes_to_unicode(), []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            found.append(ids[part])
            continue
        words = [unicodedata.normalize("NFC", part) if pre == "qwen2" else part]
        for pattern in CUTS[pre]:
            words = list(pieces(words, pattern))
        for word in words:
            written = "".join(letters[byte] for byte in word.encode())
            whole = pre == "llama-bpe" and written in ids
            found += [ids[token] for token in ([written] if whole else merged(written, ranks))]
    return found


@pytest.mark.full
@pytest.mark.parametrize("pre", CUTS)
def test_byte_pairs(tmp_path, pre):
    said = vocabulary()
    _, tokenizer = mlx_tq.load(write_gguf(tmp_path / "model.gguf", keys={"tokenizer.ggml.pre": pre}))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == by_loop(text, pre, said)
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)


def trained(prefix):
    """Train SentencePiece with byte and user tokens, and return it with the keys that the converter writes."""
    made = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(load_text()[:60_000].splitlines()), model_writer=made, model_type="bpe", vocab_size=900,
        byte_fallback=True, pad_id=3, user_defined_symbols=[] if prefix else ["▁▁", "▁▁▁▁", "\n", "\n\n", "<table>"],
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, add_dummy_prefix=prefix,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(made.getvalue())
    keys = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": [p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in proto.pieces],
        "tokenizer.ggml.scores": [p.score for p in proto.pieces],
        "tokenizer.ggml.token_type": [p.type for p in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 3,
    }  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue()), keys


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece(tmp_path, prefix):
    reference, keys = trained(prefix)
    keys |= {"tokenizer.ggml.add_space_prefix": prefix}
    _, tokenizer = mlx_tq.load(write_gguf(tmp_path / "model.gguf", keys=keys))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == [1, *reference.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("keys", "begins", "ends"),
    [
        ({}, [], []),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_tokens_that_start_and_end_every_text(tmp_path, keys, begins, ends):
    keys = {f"tokenizer.ggml.{key}": value for key, value in {"bos_token_id": 1, **keys}.items()}
    _, tokenizer = mlx_tq.load(write_gguf(tmp_path / "model.gguf", keys=keys))
    bare = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*begins, *bare, *ends]
    start = tokenizer.convert_ids_to_tokens(1)
    assert tokenizer.encode(f"{start}hello") == [1, *bare], "as mlx_lm.generate encodes it"
    assert tokenizer.encode(f"hello{start}") == [*begins, *bare, 1, *ends]
    assert copy.deepcopy(tokenizer).encode(f"{start}hello") == [1, *bare]
    prompts = PromptBuilder(tokenizer, {})
    assert prompts.completion_prompt(f"{start}hello").ids == [1, *bare]
    assert prompts.completion_prompt("hello").ids == [*begins, *bare, *ends]


@pytest.mark.parametrize(
    ("keys", "ends"),
    [({}, {2}), ({"eos": 0}, {0, 2}), ({"eos": 0, "eot": 5}, {0, 5}), ({"eom": 6}, {2, 6})],
)
def test_tokens_that_end_a_completion(tmp_path, keys, ends):
    """If the file does not name the end of a turn, it is the token that llama.cpp looks for."""
    keys = {f"tokenizer.ggml.{name}_token_id": token for name, token in keys.items()}
    _, tokenizer = mlx_tq.load(write_gguf(tmp_path / "model.gguf", keys=keys))
    assert tokenizer.eos_token_ids == ends
    assert tokenizer.chat_template == vocabulary()["tokenizer.chat_template"]


def test_a_token_that_is_too_long_to_be_one(tmp_path):
    """Its merges would take time that grows with the square of its length."""
    _, keys = trained(False)
    tokens = keys["tokenizer.ggml.tokens"]
    tokens[keys["tokenizer.ggml.token_type"].index(1)] = "ab" * 100_000
    with pytest.raises(ConfigError, match=r"a token has 200,000 characters, above 1,024"):
        mlx_tq.load(write_gguf(tmp_path / "model.gguf", keys=keys))
