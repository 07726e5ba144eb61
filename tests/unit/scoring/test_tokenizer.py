import json
from pathlib import Path
from random import Random

import pytest

from echo_coordinator.demo.tokenizer import BOS_ID, EOS_ID, VOCABULARY, save_tokenizer
from echo_coordinator.environments.base import ChatMessage, Prompt
from echo_coordinator.scoring.tokenizer import PromptTokenizer
from echo_swarm.errors import SettingsError

_TURNS = "{% for message in messages %}{{ message.content }}={% endfor %}"
TEMPLATE = "{{ bos_token }}" + _TURNS + "{% if add_generation_prompt %}-{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def configure(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without_post_processor(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))


def chat(*contents: str) -> Prompt:
    return Prompt(messages=tuple(ChatMessage(role="user", content=content) for content in contents))


def ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def test_plain_text_gets_exactly_one_beginning_token(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder, [EOS_ID])
    assert tokenizer.encode(Prompt(text="1 + 2 =")) == [BOS_ID, *ids("1 + 2 =")]
    assert tokenizer.encode(Prompt(text="<bos><bos>1")) == [BOS_ID, *ids("1")]


def test_a_template_that_writes_the_beginning_token_does_not_double_it(folder: Path) -> None:
    configure(folder, chat_template=TEMPLATE)
    tokenizer = PromptTokenizer(folder, [EOS_ID])
    assert tokenizer.encode(chat("1", "2")) == [BOS_ID, *ids("1=2=-")]


def test_a_template_that_forgets_the_beginning_token_gets_it_where_the_model_wants_one(folder: Path) -> None:
    configure(folder, chat_template="{{ messages[0].content }}=")
    assert PromptTokenizer(folder, [EOS_ID]).encode(chat("1")) == [BOS_ID, *ids("1=")]


def test_a_model_without_beginning_token_gets_none(folder: Path) -> None:
    without_post_processor(folder)
    assert PromptTokenizer(folder, [EOS_ID]).encode(Prompt(text="1")) == ids("1")
    configure(folder, bos_token=None)
    assert PromptTokenizer(folder, [EOS_ID]).encode(Prompt(text="1")) == ids("1")


def test_messages_without_a_template_are_joined(folder: Path) -> None:
    assert PromptTokenizer(folder, [EOS_ID]).render(chat("1", "2")) == "1\n\n2"


def test_a_template_file_goes_before_the_configuration(folder: Path) -> None:
    configure(folder, chat_template="from the configuration")
    (folder / "chat_template.jinja").write_text("  {% if true %}\n{{ messages[0].content }}\n  {% endif %}\n")
    assert PromptTokenizer(folder, [EOS_ID]).render(chat("7")) == "7\n"


def test_ids_match_those_of_transformers(folder: Path) -> None:
    configure(folder, chat_template=TEMPLATE)
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = PromptTokenizer(folder, [EOS_ID])
    assert tokenizer.encode(Prompt(text="58 + 26 =")) == reference("58 + 26 =")["input_ids"]
    messages = [{"role": "user", "content": "1"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(chat("1")) == expected


def test_two_hundred_strings_of_any_script_get_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    """Field case 82. Nodes have no tokenizer, GGUF files no vocabulary: nowhere else does text become ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer

    draw = Random(82)
    letters = "abc XYZ 0123 .,;{}()\n\t" + "äßéøñ" + "привет" + "日本語" + "한글" + "مرحبا" + "🙂👩‍👩‍👧"
    strings = ["".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(199)] + ["  leading and trailing  "]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(strings[:50], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    reference, ours = AutoTokenizer.from_pretrained(tmp_path), PromptTokenizer(tmp_path, [1])
    for text in strings:
        ids = reference(text)["input_ids"]
        assert ours.encode(Prompt(text=text)) == ids and ids.count(0) == 1
        assert ours.decode([*ids[1:], 1]) == reference.decode(ids[1:]) == text
        said = [{"role": "user", "content": text}]
        assert ours.encode(chat(text)) == reference.apply_chat_template(said, return_dict=False)


def test_completions_lose_their_end_token_and_nothing_else(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder, [EOS_ID])
    assert tokenizer.decode([*ids("[48]84"), EOS_ID]) == "[48]84"
    assert tokenizer.decode(ids("[48]84")) == "[48]84"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([10**6]) == ""


def test_a_template_runs_sandboxed(folder: Path) -> None:
    configure(folder, chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(SettingsError, match="chat template"):
        PromptTokenizer(folder, [EOS_ID]).render(chat("1"))


def test_what_a_template_refuses_is_said(folder: Path) -> None:
    configure(folder, chat_template="{{ raise_exception('only one turn') }}")
    with pytest.raises(SettingsError, match="only one turn"):
        PromptTokenizer(folder, [EOS_ID]).render(chat("1"))


def test_a_broken_template_or_tokenizer_is_named(folder: Path) -> None:
    configure(folder, chat_template="{% if %}")
    with pytest.raises(SettingsError, match="chat template"):
        PromptTokenizer(folder, [EOS_ID])
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        PromptTokenizer(folder, [EOS_ID])
