"""Chat templates: rendered as transformers renders them; malicious ones are stopped."""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dovetail.base.errors import FileError
from dovetail.base.limits import TEMPLATE_SECONDS
from dovetail.text import chat
from dovetail.text.chat import ChatTemplate
from dovetail.text.learn import learn

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "  Hällo 'you'\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Why?"},
]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = messages[0]['content'] %}"
        "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}"
        "{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "blocks on lines": (
        "{%- set ns = namespace(seen=0) %}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'system' %}{% continue %}{% endif %}\n"
        "    {%- set ns.seen = ns.seen + 1 %}\n"
        "<|{{ message.role }}|>\n"
        "{% generation %}{{ message.content | trim }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{{ {'seen': ns.seen, 'last': messages[-1]} | tojson }}\n"
        "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
        "{%- if documents is not none %}{{ documents }}{% endif %}"
    ),
    "macro": (
        "{% macro turn(m) %}[{{ m['role'] | upper }}] {{ m['content'].split('\n')[0] | replace('i', 'I') }}{% endmacro %}"
        "{% for m in messages | rejectattr('role', 'equalto', 'system') %}{{ turn(m) }}{{ '\n' if not loop.last }}{% endfor %}"
    ),
}
HOSTILE = {
    "loop": ("{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}", "more than"),
    "output": ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "it writes more than 1,000,000 characters"),
    "one huge text": ("{{ 'x' * 10 ** 10 }}", "MB of memory"),
    "huge number": ("{{ 9 ** (9 ** 9) }}", "more than"),
    "attribute": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "attribute by filter": ("{{ messages | attr('__class__') | attr('__init__') }}{{ ''|attr('__class__').mro() }}", "Error"),
    "globals": ("{{ raise_exception.__globals__['sys'].exit() }}", "SecurityError"),
    "format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
    "change what was given": ("{{ messages.append(1) }}", "SecurityError"),
    "range": ("{% for a in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself without end"),
    "include": ("{% include '/etc/passwd' %}", "TypeError"),
    "import": ("{% import 'os' as os %}", "Error"),
    "no template": ("{% if %}", "TemplateSyntaxError"),
    "refusal": ("{{ raise_exception('roles must alternate') }}", "the template refuses: roles must alternate"),
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    made = learn("a text of some words " * 30, 270)
    return PreTrainedTokenizerFast(tokenizer_object=made.engine, bos_token="<|end|>", eos_token="<|mask|>")


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_common_templates_are_rendered_as_by_transformers(name: str, prompt: bool, reference: PreTrainedTokenizerFast) -> None:
    wanted = reference.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False
    )
    tokens = {"bos_token": "<|end|>", "eos_token": "<|mask|>"}
    assert ChatTemplate(TEMPLATES[name], "here", tokens).render(MESSAGES, prompt=prompt) == wanted


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_hurts_is_stopped(name: str) -> None:
    template, says = HOSTILE[name]
    begin = time.monotonic()
    with pytest.raises(FileError, match="evil: the chat template cannot be rendered") as stopped:
        ChatTemplate(template, "evil").render(MESSAGES)
    assert says in str(stopped.value)
    assert time.monotonic() - begin < 2 * TEMPLATE_SECONDS + 8


@pytest.fixture
def no_child() -> None:
    """No child of other tests is idle."""
    chat._end_all()


@pytest.mark.usefixtures("no_child")
def test_one_process_renders_many_templates_and_keeps_nothing() -> None:
    template = ChatTemplate("{{ messages | length }}", "here")
    template.render([])
    assert len(chat._idle) == 1
    child = chat._idle[0]
    for name in ("loop", "one huge text", "recursion"):
        with pytest.raises(FileError):
            ChatTemplate(HOSTILE[name][0], "evil").render(MESSAGES)
    assert template.render(MESSAGES) == "4"
    assert chat._idle == [child]


@pytest.mark.usefixtures("no_child")
def test_a_process_that_was_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}", "here")
    template.render([])
    (child,) = chat._idle
    child.kill()
    child.wait()
    assert template.render(MESSAGES) == "4"
    assert chat._idle != [child]


@pytest.mark.usefixtures("no_child")
def test_threads_and_forks_have_processes_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(3000) %}{{ messages[0].content }}{% endfor %}", "here")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: template.render([{"content": str(i)}]), range(40)))
    assert found == [str(i) * 3000 for i in range(40)]
    assert 1 <= len(chat._idle) <= 4
    with multiprocessing.get_context("fork").Pool(2) as forks:
        found = forks.map(template.render, [[{"content": str(i)}] for i in range(10)])
    assert found == [str(i) * 3000 for i in range(10)]


def test_it_is_found_in_either_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="has no chat template"):
        ChatTemplate.load(tmp_path)
    config = {"chat_template": "config {{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render([]) == "config <s></s>"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "several {{ pad_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several, "bos_token": "<s>"}))
    assert ChatTemplate.load(tmp_path).render([]) == "several "
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}{{ messages | length }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "file <s>4"
