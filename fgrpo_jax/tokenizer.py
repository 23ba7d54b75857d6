"""Text to token ids and back, by the checkpoint's own tokenizer, chat template and stop ids."""

import bisect
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fgrpo_jax import UserError
from fgrpo_jax.jsons import read_json

# A chat template for base models: each message's text and a newline.
PLAIN = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a Hugging Face folder."""

    backend: Any  # transformers' fast tokenizer
    stop_ids: tuple[int, ...]  # of tokenizer, config and generation_config together
    size: int  # ids known, 0 to size - 1; a model's vocabulary may have more rows
    marks: frozenset[int]  # stop ids that are special tokens, and so no part of a text
    chat_template: str | None = None  # jinja; None: the folder's own

    def with_chat_template(self, name: str) -> "Tokenizer":
        """The tokenizer whose chat template is data.chat_template's; UserError if it has none.

        Encoding adds nothing, so the template has to write the token that begins a text. The plain
        one does where the tokenizer itself would have: Llama's does, Qwen's does not.
        """
        if not name:
            if not (self.chat_template or self.backend.chat_template):
                raise UserError(
                    f"the tokenizer in {self.backend.name_or_path} has no chat template: for a "
                    "base model set data.chat_template=plain, else take the Instruct model's "
                    "tokenizer files"
                )
            return self
        if name == "plain":
            bos = self.backend.bos_token_id
            begins = bos is not None and self.backend("a")["input_ids"][:1] == [bos]
            return dataclasses.replace(
                self, chat_template="{{ bos_token }}" + PLAIN if begins else PLAIN
            )
        try:
            template = pathlib.Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.chat_template is {name!r}: it must be plain, or a jinja file that can be "
                f"read ({error})"
            ) from error
        return dataclasses.replace(self, chat_template=template)

    def render(self, text: str, system: str = "", thinking: bool = True) -> str:
        """The chat prompt of one user message, up to where the assistant begins.

        thinking: False turns it off in templates that know enable_thinking, as Qwen3's.
        """
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        try:
            rendered = self.backend.apply_chat_template(
                messages,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **({} if thinking else {"enable_thinking": False}),
            )
            rendered.encode()  # a template may write half a surrogate pair
        except Exception as error:  # jinja's own, and those of what the template calls
            raise UserError(
                f"the chat template cannot be rendered, see data.chat_template: {error}"
            ) from error
        return rendered

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts: nothing is added, since the template has written all."""
        if not texts:
            return []
        return self.backend(list(texts), add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response without its stop token, unless that is a word of the text."""
        ids = list(ids)
        if ids and ids[-1] in self.marks:
            ids = ids[:-1]
        return self.backend.decode(ids, clean_up_tokenization_spaces=False)


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Strings that end a response, beside the stop tokens."""

    tokenizer: Tokenizer
    strings: tuple[str, ...]

    def stopped(self, tokens: np.ndarray, new: int) -> int | None:
        """The number of tokens up to the one that completes the first of the strings, or None.

        The last `new` tokens have not been looked at before.
        """
        decode = lambda end: self.tokenizer.backend.decode(
            tokens[first:end].tolist(), clean_up_tokenization_spaces=False
        )
        # a string may have begun earlier, by a token a byte at most
        first = max(0, len(tokens) - new - max(len(s.encode()) for s in self.strings))
        if not any(string in decode(len(tokens)) for string in self.strings):
            return None
        complete = lambda end: any(string in decode(end) for string in self.strings)
        ends = range(len(tokens) - new, len(tokens) + 1)
        return ends[bisect.bisect_left(ends, True, key=complete)]

    def text(self, tokens: np.ndarray) -> str:
        """The response's text, up to the first of the strings."""
        text = self.tokenizer.decode(tokens.tolist())
        return text[: min((text.find(s) for s in self.strings if s in text), default=len(text))]


def load(folder: pathlib.Path) -> Tokenizer:
    """The tokenizer of a folder; UserError where it is missing or cannot be read."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing
    from transformers import PreTrainedTokenizerFast  # seconds to import

    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json: give model.path a Hugging Face folder")
    if (folder / "tokenizer_config.json").exists():
        read_json(folder / "tokenizer_config.json")
    try:
        # Not AutoTokenizer: for model type qwen2 it puts Qwen's own splitting rules in place of
        # those in tokenizer.json.
        backend = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:
        raise UserError(
            f"the tokenizer in {folder} cannot be read: {error!s:.200}; copy tokenizer.json and "
            "tokenizer_config.json again"
        ) from error
    stop_ids = _stop_ids(folder, backend.eos_token_id)
    special = {i for i, token in backend.added_tokens_decoder.items() if token.special}
    marks = frozenset(stop_ids) & (special | {backend.eos_token_id})
    return Tokenizer(backend, stop_ids, len(backend), marks)


def _stop_ids(folder: pathlib.Path, eos: int | None) -> tuple[int, ...]:
    ids = [] if eos is None else [eos]
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        more = read_json(path).get("eos_token_id") if path.exists() else None
        more = more if isinstance(more, list) else [] if more is None else [more]
        if not all(type(token) is int and token >= 0 for token in more):
            raise UserError(
                f"{path} has eos_token_id {more!r:.80}: it must be a token's number, or a list "
                "of them"
            )
        ids += more
    if not ids:
        raise UserError(f"{folder} names no eos_token_id: add one to its generation_config.json")
    return tuple(sorted(set(ids)))
