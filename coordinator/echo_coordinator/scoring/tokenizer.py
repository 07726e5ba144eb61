"""Text to token ids and back, with the run's own tokenizer and chat template.

Only `tokenizers` and jinja2: neither torch nor transformers are imported. The rule for the beginning-of-sequence token:
a model whose tokenizer puts one before plain text gets exactly one, whether or not its chat template writes another;
any other model gets what its template writes, once.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from echo_coordinator.environments.base import Prompt
from echo_coordinator.model_folder import read_json_object
from echo_swarm.errors import SettingsError

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class PromptTokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, model_dir: Path, end_token_ids: Sequence[int]) -> None:
        """Raises SettingsError when tokenizer.json or the chat template cannot be used."""
        path = model_dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception for every cause
            raise SettingsError(f"cannot read {path}: {e}") from e
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._end_token_ids = frozenset(end_token_ids)
        path = model_dir / "tokenizer_config.json"
        config = read_json_object(path) if path.is_file() else {}
        given = [name for name in _SPECIAL_NAMES if config.get(name)]
        self._specials = {name: _content(config[name], f"{path}: {name}") for name in given}
        self._template = _compile(_template_text(model_dir, config), model_dir)
        bos = self._specials.get("bos_token")
        self._bos_id: int | None = None if bos is None else self._tokenizer.token_to_id(bos)
        with_specials = self._tokenizer.encode("a", add_special_tokens=True).ids
        self._wants_bos = self._bos_id is not None and with_specials[:1] == [self._bos_id]

    @property
    def vocabulary_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included. The model's own may be larger."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages go through a template."""
        return self._template is not None

    def render(self, prompt: Prompt) -> str:
        """Return the text of a prompt. Messages without a chat template are joined by empty lines.

        Raises:
            SettingsError: the chat template refuses these messages.

        """
        if prompt.text is not None:
            return prompt.text
        if self._template is None:
            return "\n\n".join(message.content for message in prompt.messages)
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._specials)
        except jinja2.TemplateError as e:
            raise SettingsError(f"the model's chat template refuses the prompt: {e}") from e

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's ids, with one beginning-of-sequence token or none (see the module)."""
        ids = cast("list[int]", self._tokenizer.encode(self.render(prompt), add_special_tokens=False).ids)
        if self._bos_id is None:
            return ids
        first = next((place for place, token in enumerate(ids) if token != self._bos_id), len(ids))
        return [self._bos_id] * (first > 0 or self._wants_bos) + ids[first:]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a completion's text for scoring: without the end token, without special tokens."""
        ids = list(token_ids)
        while ids and ids[-1] in self._end_token_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _compile(text: str | None, model_dir: Path) -> jinja2.Template | None:
    if text is None:
        return None
    # Templates come with models that others made: sandboxed, as transformers does it.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as e:
        raise SettingsError(f"the chat template of {model_dir} cannot be read: {e}") from e


def _template_text(model_dir: Path, config: dict[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise SettingsError(f"cannot read {file}: {e}") from e
    value = config.get("chat_template")
    if isinstance(value, list):
        for entry in cast("list[Any]", value):
            fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
            if fields.get("name") == "default":
                value = fields.get("template")
    return value if isinstance(value, str) else None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _content(token: Any, where: str) -> str:
    content = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise SettingsError(f"{where} is no token")
    return content
