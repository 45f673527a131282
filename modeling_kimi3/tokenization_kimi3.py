"""The family's tiktoken vocabulary as a fast tokenizer without remote code (spec section 10), and a byte tokenizer."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES, TOKENIZER_MAPPING_NAMES
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.tokenization_utils_tokenizers import TokenizersBackend

NUM_SPECIAL_TOKENS = 256

# Letters outside Han that can begin a word (upper), and that can continue it (lower). The engine of `tokenizers` knows
# set intersection; its Unicode tables equal those of tiktoken's engine.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

BYTE_SPECIALS = {"<eos>": 0xFD, "<bos>": 0xFE, "<pad>": 0xFF}


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: itself where it is visible Latin-1."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(replacements)) for byte in range(256)]


def read_tiktoken_ranks(path: str | Path) -> dict[bytes, int]:
    """Reads a `tiktoken.model`: one line per token, base64 of its bytes and its rank.

    Returns:
        Rank by token, the ranks being 0 to n-1.

    Raises:
        ValueError: a line cannot be read, or the ranks are not 0 to n-1, each once.
    """
    ranks: dict[bytes, int] = {}
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is not 'base64 token, rank'.") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise ValueError(f"{path}: the {len(ranks)} tokens have other ranks than 0 to {len(ranks) - 1}, each once.")
    return ranks


def special_token_names(num_ranks: int, named: Mapping[int, str]) -> list[str]:
    """Names of the special ids that follow the ranks, in order; at least 256.

    Args:
        num_ranks: the first special id.
        named: names by id, from `added_tokens_decoder`; the others are called reserved.

    Raises:
        ValueError: a named id is one of a rank, or two ids have the same name.
    """
    inside = {index: name for index, name in named.items() if index < num_ranks}
    if inside:
        raise ValueError(f"added_tokens_decoder names {inside}: expected ids from {num_ranks} on, after the ranks.")
    end = max(num_ranks + NUM_SPECIAL_TOKENS, max(named, default=0) + 1)
    names = [named.get(index, f"<|reserved_token_{index}|>") for index in range(num_ranks, end)]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"added_tokens_decoder names {twice} more than once: expected one id for each name.")
    return names


def build_backend(ranks: Mapping[bytes, int], special_names: list[str]) -> Tokenizer:
    """The `tokenizers` object for tiktoken ranks followed by special tokens.

    tiktoken merges the adjacent pair whose concatenation has the lowest rank, whatever the two parts are. So every
    split of a token into two known ones becomes a merge, in the order of the tokens' ranks.
    """
    characters = _byte_characters()

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges.extend((spell(left), spell(right)) for left, right in splits if left in ranks and right in ranks)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special_names])
    for index, name in enumerate(special_names, start=len(ranks)):
        if backend.token_to_id(name) != index:
            raise ValueError(f"special token {name!r} (id {index}) is spelled like one of the ranks' tokens.")
    return backend


class _OrdinaryTextTokenizer(TokenizersBackend):
    """Text that spells a special token is ordinary text, unless `split_special_tokens=False` allows special tokens.

    That can be said per call, as in `tokenizer(text, split_special_tokens=False)`, or when the tokenizer is loaded. A
    chat template is the one caller that means them: what it renders is encoded with special tokens allowed, the
    messages in it included, as with any template. A template rendered with `tokenize=False` is text like any other.
    """

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["tokenizer_kwargs"] = {"split_special_tokens": False, **(kwargs.get("tokenizer_kwargs") or {})}
        return super().apply_chat_template(*args, **kwargs)


class KimiK3Tokenizer(_OrdinaryTextTokenizer):
    """Kimi K3's tokenizer: ids from a directory's `tiktoken.model`, special tokens from its `tokenizer_config.json`.

    A directory with a `tokenizer.json` is loaded from that file alone, as transformers' ordinary fast tokenizer does;
    `save_pretrained` writes one. Nothing is put before or after a text. See `_OrdinaryTextTokenizer` for text that
    spells special tokens.
    """

    vocab_files_names = {"vocab_file": "tiktoken.model", "tokenizer_file": "tokenizer.json"}

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Turns the files' paths and settings that transformers collected into arguments of `__init__`.

        Raises:
            ValueError: there is neither a `tokenizer.json` nor a `tiktoken.model`, or the latter cannot be used.
        """
        # The remote code it points to is not needed, and a saved copy would point to files that are not there.
        kwargs.pop("auto_map", None)
        tokenizer_file, vocab_file = kwargs.get("tokenizer_file"), kwargs.get("vocab_file")
        if tokenizer_file is not None and Path(tokenizer_file).is_file():
            return super().convert_to_native_format(trust_remote_code=trust_remote_code, **kwargs)
        if vocab_file is None or not Path(vocab_file).is_file():
            raise ValueError(f"{kwargs.get('name_or_path')} has neither tiktoken.model nor tokenizer.json.")
        ranks = read_tiktoken_ranks(vocab_file)
        named = {int(index): str(token) for index, token in (kwargs.pop("added_tokens_decoder", None) or {}).items()}
        kwargs["tokenizer_object"] = build_backend(ranks, special_token_names(len(ranks), named))
        kwargs.setdefault("split_special_tokens", True)
        return kwargs


class KimiK3ByteTokenizer(_OrdinaryTextTokenizer):
    """One id per UTF-8 byte, its value. For models without a tokenizer, for demonstrations and for tests.

    The vocabulary has exactly 256 ids. Three bytes that UTF-8 never uses are the special tokens: `<eos>` 253, `<bos>`
    254, `<pad>` 255. `decode(encode(text))` is `text`, for any `text` that UTF-8 can write. Nothing is put before or
    after a text.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}

    def __init__(self, **kwargs: Any):
        if kwargs.get("tokenizer_file") is None and kwargs.get("tokenizer_object") is None:
            kwargs["tokenizer_object"] = _byte_backend()
        defaults = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "split_special_tokens": True}
        super().__init__(**{**defaults, **kwargs})

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        # The base class would take the file apart for a class with an `__init__` of its own.
        return kwargs


def _byte_backend() -> Tokenizer:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    specials = {byte: name for name, byte in BYTE_SPECIALS.items()}
    vocabulary = {specials.get(byte, character): byte for character, byte in vocabulary.items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in BYTE_SPECIALS])
    return backend


def register_tokenizers() -> None:
    """Makes `AutoTokenizer` load K3 and Kimi-Linear directories with `KimiK3Tokenizer`; a second call changes nothing.

    Found by class name: `TikTokenTokenizer` is what the released files say. The classes are left out of transformers'
    table from config to tokenizer, where an entry means that `trust_remote_code=True` runs the directory's own code;
    a directory that names no class finds ours through its config's `tokenizer_class`.
    """
    for tokenizer in (KimiK3Tokenizer, KimiK3ByteTokenizer):
        REGISTERED_TOKENIZER_CLASSES[tokenizer.__name__] = tokenizer
    REGISTERED_TOKENIZER_CLASSES["TikTokenTokenizer"] = KimiK3Tokenizer
    # These entries would send a tiktoken.model to transformers' generic split pattern.
    for model_type in ("kimi_k3", "kimi_linear"):
        TOKENIZER_MAPPING_NAMES.pop(model_type, None)
    KimiLinearConfig.tokenizer_class = KimiK3Tokenizer.__name__  # type: ignore[attr-defined]
