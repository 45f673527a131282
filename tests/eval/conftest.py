"""Tokenizers of every kind, a tiny checkpoint, and scripted models that the harness runs like any other."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lm_eval.api.model import LM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kimi3_eval.haystack import prose
from kimi3_eval.holdback import Column
from kimi3_eval.tokens import encoder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if not (loop.last and m['role'] == 'assistant') %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]


def _byte_level(merges: int, bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIALS) + 256 + merges,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose().sentences[:800] if merges else [], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


def _metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose().sentences[:800], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A directory with a tokenizer: `byte`, `bpe`, `bpe-bos` (adds a BOS token) or `metaspace` (not additive)."""
    made: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in made:
            path = tmp_path_factory.mktemp("tokenizer") / kind
            tokenizer = {
                "byte": lambda: _byte_level(0, False),
                "bpe": lambda: _byte_level(1000, False),
                "bpe-bos": lambda: _byte_level(1000, True),
                "metaspace": _metaspace,
            }[kind]()
            tokenizer.save_pretrained(path)
            made[kind] = str(path)
        return made[kind]

    return make


@pytest.fixture(autouse=True)
def sample_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a sample cache of its own."""
    path = tmp_path / "sample-cache"
    monkeypatch.setenv("KIMI3_EVAL_CACHE", str(path))
    return path


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Callable[[str], str]) -> str:
    """A random Llama of a few thousand parameters with the `bpe` tokenizer, context 4096."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    PreTrainedTokenizerFast.from_pretrained(tokenizer_dir("bpe")).save_pretrained(path)
    return str(path)


class Oracle(LM):
    """A scripted model: reads the needles in the last `window` tokens of the prompt and answers what is asked.

    Args:
        tokenizer: Directory of the tokenizer that `window` is counted in.
        window: Tokens it sees; None for all.
        right: Whether it answers rightly.
        fail_after: Raises KeyboardInterrupt after that many answers.
    """

    def __init__(
        self, tokenizer: str, window: int | None = None, right: bool = True, fail_after: int | None = None
    ) -> None:
        super().__init__()
        self.encoder = encoder(tokenizer)
        self.window = window
        self.right = right
        self.fail_after = fail_after
        self.answered: list[str] = []

    @contextmanager
    def hold_back(self, column: Column) -> Iterator[None]:
        """A window of its own while softmax layers are held back; other columns leave it as it is."""
        before = self.window
        self.window = column.window if column.kind == "softmax-window" else before
        yield
        self.window = before

    def answer(self, prompt: str) -> str:
        if not self.right:
            return "nothing of the kind"
        seen = prompt
        if self.window is not None:
            ids = self.encoder.whole(prompt, special=False)[-self.window :]
            seen = self.encoder.tokenizer.decode(ids.tolist())
        if seen.endswith("they are: "):
            return self._variables(seen)
        if prompt.endswith("in the list are:"):
            words = re.findall(r"\d+\. (\S+)", seen.rsplit("appear most often.\n", 1)[1].split("\nQuestion")[0])
            return " ".join(f"{i + 1}. {word}" for i, (word, _) in enumerate(Counter(words).most_common(10)))
        if prompt.endswith("appeared words are:"):
            text = seen.split("coded words. ", 1)[1].split("\nQuestion")[0]
            return ", ".join(word for word, _ in Counter(text.split()).most_common(4) if word != "...")
        if prompt.endswith(" order:"):
            words = seen.split(" order.\n")[1].split("\n")[0].split()
            return " ".join(words[::-1] if "reverse" in prompt else words)
        if prompt.endswith("The word on top is"):
            held: list[str] = []
            for line in re.findall(r"push \w+|pop(?=\n)", seen):
                if line == "pop":
                    held.pop()
                else:
                    held.append(line.removeprefix("push "))
            return held[-1]
        asked = re.search(r"The values of (.+) are$", prompt)
        if asked:
            keys = re.split(r", and |, ", asked[1])
            return ", ".join(v for k in keys for v in re.findall(rf"^{re.escape(k)}: (\d+)$", seen, re.M))
        query = re.search(r"The special magic \w+ for (.+) mentioned in the provided text (?:is|are)$", prompt)
        assert query is not None
        keys = re.split(r", and |, ", query[1])
        return ", ".join(
            value
            for key in keys
            for value in re.findall(rf"One of the special magic \w+ for {re.escape(key)} is: ([\w-]+)\.", seen)
        )

    @staticmethod
    def _variables(seen: str) -> str:
        """Follows the chain of the last text: example names are three letters long and stand in no later line."""
        text = seen.rsplit("Memorize and track", 1)[1]
        value = re.search(r"are assigned the value (\d+), they are: $", seen)
        assert value is not None
        names = re.findall(rf"VAR (\w+) = {value[1]}\n", text)
        for new, old in re.findall(r"VAR (\w+) = VAR (\w+) \n", text):
            names += [new] if old in names else []
        return " ".join(names)

    def generate_until(self, requests: list) -> list[str]:
        answers = []
        for request in requests:
            if self.fail_after is not None and len(self.answered) >= self.fail_after:
                raise KeyboardInterrupt
            answer = self.answer(request.args[0])
            self.answered.append(request.args[0])
            self.cache_hook.add_partial("generate_until", request.args, answer)
            answers.append(answer)
        return answers

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        raise NotImplementedError


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    """The scripted model's class."""
    return Oracle
