"""Answers on disk: an interrupted run goes on where it stopped.

Each process appends to a file of its own and reads those of all, so that a run can resume with another number of
processes. The key holds a fingerprint of the model, so that another model never gets these answers.
"""

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM


def model_fingerprint(path: Path) -> str:
    """A hash of a checkpoint's config and of its weight files' names, sizes, headers and times."""
    digest = hashlib.sha256()
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        stat = file.stat()
        digest.update(f"{file.name}|{stat.st_size}|{stat.st_mtime_ns}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(2**16))
    return digest.hexdigest()[:16]


class AnswerStore:
    """A directory of answers.

    Args:
        directory: Where the files are.
        fingerprint: Everything but the request that decides an answer: model, dtype, versions, mechanism held back.
        rank: Number of this process, which names its file.
    """

    def __init__(self, directory: Path, fingerprint: str, rank: int = 0) -> None:
        self.fingerprint = fingerprint
        self._answers: dict[str, Any] = {}
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(directory.glob("rank*.jsonl")):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)
        own = directory / f"rank{rank}.jsonl"
        torn = own.is_file() and not own.read_bytes().endswith(b"\n")
        self._file = own.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return
        if isinstance(row, dict) and "key" in row and "answer" in row:
            self._answers[row["key"]] = row["answer"]

    def key(self, method: str, arguments: Any) -> str:
        """The key of one request."""
        content = json.dumps([self.fingerprint, method, list(arguments)], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def get(self, key: str) -> Any | None:
        """The answer, or None."""
        return self._answers.get(key)

    def put(self, key: str, answer: Any) -> None:
        """Keeps an answer and writes it out at once."""
        with self._lock:
            if key not in self._answers:
                self._answers[key] = answer
                self._file.write(json.dumps({"key": key, "answer": answer}, ensure_ascii=False) + "\n")
                self._file.flush()

    def add_partial(self, method: str, arguments: Any, answer: Any) -> None:
        """lm-eval's hook for answers that come before their batch of requests is done."""
        self.put(self.key(method, arguments), answer)

    def __len__(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        """Closes this process's file."""
        self._file.close()


class ResumableLM(LM):
    """Any lm-eval model with an answer store before it. Sampled answers are neither kept nor reused."""

    def __init__(self, inner: LM, store: AnswerStore) -> None:
        super().__init__()
        self.inner = inner
        self.store = store
        self.reused = 0
        self.model_seconds = 0.0
        inner.set_cache_hook(store)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def device(self) -> Any:
        return self.inner.device

    def all_gather(self, tensor: Any) -> Any:
        return self.inner.all_gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        return self.inner.gather_object(obj, dst)

    def barrier(self) -> None:
        self.inner.barrier()

    @property
    def tokenizer_name(self) -> str:
        return self.inner.tokenizer_name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.inner.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.inner.chat_template(chat_template)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self._through_store("generate_until", requests)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [(float(value), bool(greedy)) for value, greedy in self._through_store("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._through_store("loglikelihood_rolling", requests)

    def token_losses(self, requests: list[Instance]) -> list[list[list[float]]]:
        """This package's own kind of request, see `model.Kimi3LM.token_losses`."""
        return self._through_store("token_losses", requests)

    def _through_store(self, method: str, requests: list[Instance]) -> list[Any]:
        keys: list[str | None] = []
        waiting: dict[str, Instance] = {}
        sampled: list[int] = []
        for number, request in enumerate(requests):
            if method == "generate_until" and request.args[1].get("do_sample"):
                keys.append(None)
                sampled.append(number)
                continue
            key = self.store.key(method, request.args)
            keys.append(key)
            if self.store.get(key) is None:
                waiting.setdefault(key, request)
            else:
                self.reused += 1
        todo = [*waiting.values(), *(requests[number] for number in sampled)]
        started = time.perf_counter()
        answers = getattr(self.inner, method)(todo) if todo else []
        self.model_seconds += time.perf_counter() - started
        for key, answer in zip(waiting, answers):
            self.store.put(key, answer)
        drawn = dict(zip(sampled, answers[len(waiting) :]))
        return [drawn[number] if key is None else self.store.get(key) for number, key in enumerate(keys)]
