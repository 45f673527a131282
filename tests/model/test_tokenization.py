"""KimiK3Tokenizer against the `tiktoken` package, on a small vocabulary trained here."""

import base64
import importlib
import json
import random
import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, KimiLinearConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from modeling_kimi3 import KimiK3Config, KimiK3Tokenizer
from modeling_kimi3.tokenization_kimi3 import SPLIT_PATTERN, build_backend, read_tiktoken_ranks, special_token_names

tiktoken = pytest.importorskip("tiktoken")

# The alternatives of the released pattern, as its description lists them.
RELEASED_PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)

TEXTS = [
    "",
    " ",
    "Hello world, it's the TEST of CamelCase and don't/DON'T/we'll/I've.",
    "你好，世界！这是 一个测试。漢字かなカナ混じり文。",
    "mixed中文English混合text，with 12345 numbers 3.14159 and 2026年12月1日",
    "tabs\tand\n\nnewlines\r\n\r\n  trailing spaces   \n   indented\n",
    "    four spaces,\u3000ideographic\u00a0no-break\u2003em",
    "emoji 😀👍🏽👩‍👩‍👧 flags 🇩🇪 and ﬁ ligature, ſ long s: it'ſ",
    "naïve café e\u0301 combining \u0301\u0301 marks, Ǆ title ǅ, Ⅻ ½ ٣",
    "Ελληνικά Русский العربية עברית हिन्दी ไทย 한국어",
    "snake_case kebab-case path/to/file.py a+b==c &&|| <tag attr='x'>",
    "AAAA aaaa AaAa 'S 's ''s 'Re 'VE 'LL's",
    "\x00\x01\x7f\x80\ufffd\ufeff",
    "12345678901234567890 1 12 123 1234",
    "[BOS]text<|open|>user<|sep|>[EOS]<|reserved_token_700|> <|end_of_msg|>",
]

NAMES = {0: "[BOS]", 1: "<|open|>", 2: "[EOS]", 3: "<|close|>", 4: "<|sep|>", 7: "<|end_of_msg|>", 255: "[PAD]"}


@pytest.fixture(scope="module")
def ranks():
    """About 700 ranks of byte-pair encoding trained on the texts above."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(RELEASED_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(TEXTS * 3 + ["the then there other spaces      aaaaaaaaaa"] * 3, trainer)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of[character] for character in token): rank for token, rank in vocabulary}


@pytest.fixture(scope="module")
def special_ids(ranks):
    """The 256 special ids by name."""
    names = [NAMES.get(offset, f"<|reserved_token_{len(ranks) + offset}|>") for offset in range(256)]
    return {name: len(ranks) + offset for offset, name in enumerate(names)}


@pytest.fixture(scope="module")
def reference(ranks, special_ids):
    return tiktoken.Encoding("small", pat_str=RELEASED_PATTERN, mergeable_ranks=dict(ranks), special_tokens=special_ids)


@pytest.fixture
def release(tmp_path, ranks):
    """A directory as released: tiktoken.model, tokenizer_config.json that points to remote code, config.json."""

    def make(config=None, **changes):
        lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
        (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
        entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        added = {
            str(len(ranks) + offset): {"content": name, "special": offset != 3, **entry}
            for offset, name in NAMES.items()
        }
        settings = {
            "added_tokens_decoder": added,
            "additional_special_tokens": ["<|end_of_msg|>"],
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "bos_token": "[BOS]",
            "clean_up_tokenization_spaces": False,
            "eos_token": "[EOS]",
            "model_max_length": 1048576,
            "pad_token": "[PAD]",
            "tokenizer_class": "TikTokenTokenizer",
            **changes,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.fixture(scope="module")
def tokenizer(ranks, tmp_path_factory):
    """Loaded once for the comparisons; the loading itself has tests of its own."""
    path = tmp_path_factory.mktemp("small")
    (path / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    )
    added = {str(len(ranks) + offset): {"content": name, "special": True} for offset, name in NAMES.items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": "[EOS]"}))
    return KimiK3Tokenizer.from_pretrained(path)


# The vocabulary


def test_the_pattern_is_the_released_one():
    assert SPLIT_PATTERN == RELEASED_PATTERN


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_tiktokens(tokenizer, reference, text):
    expected = reference.encode_ordinary(text)
    assert tokenizer(text).input_ids == expected
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("aA1 '\n\r\tsS中あ\u0301.é<|>", max_size=60))
@example("a" * 300)
@example("\r\n \r\n")
@example(" 's'S'LL 中'd")
def test_any_text_equals_tiktokens(tokenizer, reference, text):
    ids = tokenizer(text).input_ids
    assert ids == reference.encode_ordinary(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("letters", ["ab", "a ", "aA中"])
def test_vocabularies_of_repeated_letters_merge_as_tiktoken_does(letters):
    """Ranks at random, so that one token can come from several pairs and occurrences overlap."""
    rng = random.Random(letters)
    for _ in range(20):
        tokens = {"".join(rng.choices(letters, k=rng.randint(2, 6))).encode() for _ in range(30)}
        ordered = [bytes([byte]) for byte in range(256)] + rng.sample(sorted(tokens), len(tokens))
        small = {token: rank for rank, token in enumerate(ordered)}
        backend = build_backend(small, [])
        expected = tiktoken.Encoding("r", pat_str=RELEASED_PATTERN, mergeable_ranks=small, special_tokens={})
        for _ in range(40):
            text = "".join(rng.choices(letters, k=rng.randint(0, 60)))
            assert backend.encode(text).ids == expected.encode_ordinary(text), (text, ordered[256:])


@pytest.mark.parametrize(
    "piece",
    [
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"[^\r\n\p{L}\p{N}]",
        r"\p{N}",
        r"[^\s\p{L}\p{N}]",
        r"(?i:[stremvld])",
    ],
)
def test_both_engines_read_the_classes_alike(piece):
    """Over all code points: set intersection is known to the engine, and the Unicode tables are the same."""
    everything = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    split = pre_tokenizers.Split(Regex(piece), behavior="removed")
    outside = set("".join(part for part, _ in split.pre_tokenize_str(everything)))
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    # tiktoken drops what its pattern does not match.
    encoding = tiktoken.Encoding("class", pat_str=piece, mergeable_ranks=single_bytes, special_tokens={})
    inside = set(encoding.decode(encoding.encode_ordinary(everything)))
    assert inside and inside == set(everything) - outside


@pytest.mark.parametrize("unit", ["a", "A", "aB", "é", "あ", "中", " ", "\n", " \n", "1", "!", "\u0301", "'s"])
def test_very_long_runs_neither_hang_nor_change(tokenizer, reference, unit):
    text = unit * (60_000 // len(unit))
    start = time.perf_counter()
    ids = tokenizer(text).input_ids
    # Measured: under 0.1 s. Anything quadratic takes minutes.
    assert time.perf_counter() - start < 10
    assert tokenizer.decode(ids) == text
    assert ids[:20_000] == reference.encode_ordinary(text)[:20_000]


# Special tokens


def test_spelled_special_tokens_are_text_unless_allowed(tokenizer, reference, special_ids):
    text = TEXTS[-1]
    assert not set(tokenizer(text).input_ids) & set(special_ids.values())
    allowed = reference.encode(text, allowed_special="all")
    assert set(allowed) & set(special_ids.values())
    assert tokenizer(text, split_special_tokens=False).input_ids == allowed
    assert tokenizer([text, "a"], split_special_tokens=False).input_ids[0] == allowed
    # Said for one call only.
    assert tokenizer(text).input_ids == reference.encode_ordinary(text)


def test_all_256_special_ids_are_named(tokenizer, ranks, special_ids):
    assert len(tokenizer) == len(ranks) + 256
    for name, index in special_ids.items():
        assert tokenizer.convert_tokens_to_ids(name) == index
        assert tokenizer.convert_ids_to_tokens(index) == name
        assert tokenizer.decode([index]) == name
        assert tokenizer.decode([index], skip_special_tokens=True) == ""


def test_a_chat_template_means_its_markers(tokenizer, special_ids):
    template = "{% for m in messages %}<|open|>{{ m.content }}<|close|>{% endfor %}"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=template)["input_ids"]
    assert (ids[0], ids[-1]) == (special_ids["<|open|>"], special_ids["<|close|>"])
    assert tokenizer.decode(ids) == "<|open|>hi<|close|>"
    assert tokenizer.chat_template is None


def test_offsets_point_into_the_text(tokenizer):
    text = "Hello 世界, it's 123\n"
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert encoded.offset_mapping[-1][1] == len(text)
    for index, (start, end) in zip(encoded.input_ids, encoded.offset_mapping):
        piece = tokenizer.decode([index])
        assert "\ufffd" in piece or piece == text[start:end]


# Loading


@pytest.fixture
def configs(released):
    text = released["text_config"]
    plain = {key: value for key, value in text.items() if not key.startswith("activation")} | {"hidden_act": "silu"}
    return {"composite": released, "flat": text, "kimi_linear": plain, "none": None}


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("kind", ["composite", "flat", "kimi_linear", "none"])
def test_a_released_directory_loads_without_its_code(
    release, configs, reference, special_ids, kind, trust, monkeypatch
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked about remote code"))
    loaded = AutoTokenizer.from_pretrained(release(configs[kind]), trust_remote_code=trust)
    assert type(loaded) is KimiK3Tokenizer
    assert loaded(TEXTS[4]).input_ids == reference.encode_ordinary(TEXTS[4])
    assert loaded.bos_token_id == special_ids["[BOS]"]
    assert loaded.eos_token_id == special_ids["[EOS]"]
    assert loaded.pad_token_id == special_ids["[PAD]"]
    assert loaded.model_max_length == 1048576
    # A marker that the file does not call special is a control token all the same.
    assert special_ids["<|close|>"] not in loaded("<|close|>").input_ids
    assert loaded("<|close|>", split_special_tokens=False).input_ids == [special_ids["<|close|>"]]


@pytest.mark.parametrize("changes", [{"auto_map": None}, {"auto_map": None, "tokenizer_class": None}])
@pytest.mark.parametrize("kind", ["composite", "flat", "kimi_linear"])
def test_a_directory_that_names_less(release, configs, reference, kind, changes):
    loaded = AutoTokenizer.from_pretrained(release(configs[kind], **changes))
    assert type(loaded) is KimiK3Tokenizer
    assert loaded(TEXTS[4]).input_ids == reference.encode_ordinary(TEXTS[4])


@pytest.mark.parametrize("kind", ["composite", "none"])
def test_saved_and_loaded_again(release, configs, tmp_path_factory, kind):
    loaded = AutoTokenizer.from_pretrained(release(configs[kind]))
    target = tmp_path_factory.mktemp("saved")
    loaded.save_pretrained(target)
    if configs[kind] is not None:
        KimiK3Config(**configs[kind]).save_pretrained(target)
    assert "auto_map" not in json.loads((target / "tokenizer_config.json").read_text())
    again = AutoTokenizer.from_pretrained(target)
    assert type(again) is KimiK3Tokenizer
    assert again.backend_tokenizer.to_str() == loaded.backend_tokenizer.to_str()
    assert again.special_tokens_map == loaded.special_tokens_map
    assert (again.split_special_tokens, again.model_max_length) == (True, 1048576)
    for text in TEXTS:
        assert again(text).input_ids == loaded(text).input_ids
        allowed = loaded(text, split_special_tokens=False).input_ids
        assert again(text, split_special_tokens=False).input_ids == allowed
    # Also readable by a process that does not know this package.
    plain = TokenizersBackend.from_pretrained(target)
    assert plain(TEXTS[-1]).input_ids == loaded(TEXTS[-1]).input_ids


def test_special_tokens_can_be_allowed_for_good(release, configs, special_ids, tmp_path_factory):
    loaded = AutoTokenizer.from_pretrained(release(configs["composite"]), split_special_tokens=False)
    assert loaded("[EOS]").input_ids == [special_ids["[EOS]"]]
    target = tmp_path_factory.mktemp("saved")
    loaded.save_pretrained(target)
    assert AutoTokenizer.from_pretrained(target)("[EOS]").input_ids == [special_ids["[EOS]"]]


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("kind", ["composite", "flat", "kimi_linear"])
def test_a_plain_tokenizer_json_is_taken_as_it_is(tmp_path, configs, kind, named):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "<s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", bos_token="<s>").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | ({"tokenizer_class": named} if named else {}))
    )
    (tmp_path / "config.json").write_text(json.dumps(configs[kind]))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("a b c").input_ids == [1, 2, 0]
    assert loaded("a <s>").input_ids == [1, 3]
    if named:
        assert type(loaded) is TokenizersBackend


def test_configs_name_the_class_without_saving_it(tmp_path):
    assert KimiLinearConfig.tokenizer_class == KimiK3Config.tokenizer_class == "KimiK3Tokenizer"
    for config in (KimiLinearConfig(), KimiK3Config()):
        assert "tokenizer_class" not in config.to_dict()


# What is refused


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "0 tokens"),
        (b"YQ== 0\nYg== 2\n", r"2 tokens have other ranks than 0 to 1"),
        (b"YQ== 0\nYg== 0\n", r"other ranks"),
        (b"YQ== 0\nYg==\n", r"line 2: b'Yg==' is not"),
        (b"YQ== 0\n!!! 1\n", r"line 2"),
        (b"YQ== zero\n", r"line 1"),
    ],
)
def test_a_broken_tiktoken_model_is_refused(tmp_path, content, message):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tiktoken_ranks(path)


def test_ranks_are_read_as_tiktoken_reads_them(release, ranks):
    path = release() / "tiktoken.model"
    assert read_tiktoken_ranks(path) == ranks == importlib.import_module("tiktoken.load").load_tiktoken_bpe(str(path))


def test_special_names_that_cannot_be_are_refused(ranks):
    with pytest.raises(ValueError, match=r"names \{3: '<x>'\}: expected ids from 700 on"):
        special_token_names(700, {3: "<x>"})
    with pytest.raises(ValueError, match=r"names \['<x>'\] more than once"):
        special_token_names(700, {701: "<x>", 702: "<x>"})
    with pytest.raises(ValueError, match=r"'the' \(id \d+\) is spelled like"):
        assert b"the" in ranks
        build_backend(ranks, ["the"])
    assert len(special_token_names(10, {300: "<x>"})) == 291


def test_a_directory_without_a_vocabulary_is_refused(release, configs):
    path = release(configs["composite"])
    (path / "tiktoken.model").unlink()
    with pytest.raises(ValueError, match=r"neither tiktoken\.model nor tokenizer\.json"):
        AutoTokenizer.from_pretrained(path)
