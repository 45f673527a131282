"""KimiK3ByteTokenizer: ids are bytes, any text comes back, and it is saved and loaded like any tokenizer."""

import functools
import time

from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from modeling_kimi3 import KimiK3ByteTokenizer, KimiK3Config


@functools.cache
def byte_tokenizer():
    return KimiK3ByteTokenizer()


@settings(max_examples=300, deadline=None)
@given(st.text())
@example("<bos><eos><pad>")
@example("\x00 \r\n  a\u0301 😀\U0010ffff")
def test_bytes_are_ids_and_come_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_byte_ids_of_special_tokens():
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == 256
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (253, 254, 255)
    assert tokenizer.is_fast
    assert tokenizer("<bos>a", split_special_tokens=False).input_ids == [254, 97]
    assert tokenizer.decode([254, 97, 253, 255], skip_special_tokens=True) == "a"
    assert tokenizer.decode([254, 97]) == "<bos>a"
    batch = tokenizer(["a", "bcd"], padding=True)
    assert batch.input_ids == [[97, 255, 255], [98, 99, 100]]
    assert tokenizer.decode([0xE4, 0xB8]) == "\ufffd"


def test_byte_tokenizer_fits_the_presets():
    config, tokenizer = KimiK3Config.from_preset("tiny-1m"), byte_tokenizer()
    assert config.vocab_size == len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(tokenizer, name)


def test_byte_tokenizer_saved_and_loaded_again(tmp_path):
    tokenizer = KimiK3ByteTokenizer(padding_side="left", model_max_length=77)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    for with_config in (False, True):
        if with_config:
            KimiK3Config.from_preset("tiny-1m").save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert type(again) is KimiK3ByteTokenizer
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert again("a<extra><eos>").input_ids == [97, 256, *b"<eos>"]
        assert (again.padding_side, again.model_max_length) == ("left", 77)
        assert again.special_tokens_map == tokenizer.special_tokens_map


def test_a_very_long_byte_run():
    text = "a" * 1_000_000
    start = time.perf_counter()
    assert len(byte_tokenizer()(text).input_ids) == len(text)
    # Measured: 0.6 s.
    assert time.perf_counter() - start < 30
