"""Chat templates: real jinja2 as the reference renders it, and hostile templates that must be stopped."""

import pytest

from minipop.chat_template import ChatTemplate, Refusal
from minipop.errors import TokenizerError

CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]


def render(source: str, **variables) -> str:
    return ChatTemplate(source, "a.jinja").render({"messages": CHAT, "tools": None, **variables})


USED = [
    "{%- macro m(a, b='d') -%}<{{ a }}|{{ b }}>{%- endmacro -%}{{ m(1) ~ m('x', b=2) ~ none }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}{% call m(1, [2], a=3) %}inner{% endcall %}",
    "{{ 'a' * 3 + 'b' }} {{ [1] * 2 + [3] }} {{ 7 // 2 ** 2 }} {{ -5 % 3 }} {{ 1 / 4 }} {{ 2 * 1.5 }}",
    "{{ '%s-%03d %%' % ('a', 7) }} {{ '{}+{x:>4}'.format(1, x=2) }} {{ '%s, %s' | format('a', 'b') }} {{ '"
    "{{ literal }}'.format() }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.content[::-1] }}"
    "{% if loop.first %}{% continue %}"
    "{% endif %}!{% if loop.index0 == 1 %}{% break %}{% endif %}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m['content'] }}{% endfor %}{% for m in [] %}"
    "{% else %}none{% endfor %}",
    "{% for k, v in {'b': 1, 'a': [1, 'é\"<&']} | dictsort %}{{ k }}={{ v | tojson }};{% endfor %}",
    "{{ {'a': [1, {'b': none}]} | tojson(indent=2) }} {{ ['é'] | tojson(ensure_ascii=true) }} "
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "{{ [3, 1, 2] | sort | join(', ') }} {{ messages | map(attribute='content') | join('/') }} "
    "{{ messages | join(',', attribute='role') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
    "{{ messages | rejectattr('role', 'equalto', 'user') | list }}",
    "{{ ' x ' | trim | upper | replace('X', 'yy') }} {{ 'aXa'.replace('a', 'b', 1) }} "
    "{{ 'a\nb\n' | indent(2, true) }} {{ 'ab' | title }}",
    "{{ nothing | default('none') }} {{ [1, 2] | first }}{{ (1, 2) | last }} {{ [1, 1, 2] | unique | list }} {{ 'abc' | list }}",
    "{% set ns = namespace(n=0) %}{% for i in range(5) if i is even %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
    "{{ 'a,b'.split(',') }} {{ ' ab'.strip().startswith('a') }} {{ ','.join(['a', 'b']) }} "
    "{{ 'abcb'.rsplit('b', 1)[0] }} {{ 'ab'.find('b') }}",
    "{% set block %}in {{ 1 }}{% endset %}{{ block }} {% set a, b = 1, 2 %}{{ b }} "
    "{{ dict(a=1).items() | list }} {{ messages[0].get('no', 'x') }}",
    "{{ 'x' in 'xy' and not false }} {{ messages[-1].content }} {{ messages[1:] | length }} "
    "{{ (messages[0] | items | list)[0] }}",
    "{% for n in [[1, [2]], 3] recursive %}{% if n is iterable and n is not string %}[{{ loop(n) }}]{% else %}"
    "{{ n }}{% endif %}{% endfor %}",
    "{{ 1.5 | int }} {{ '7' | int + 1 }} {{ [1, 2] | max }} {{ 'a b' | wordcount }} {{ 'x' | safe | e }} "
    "{{ \"<&'\" | e }} {{ 3 | string + 'x' }}",
    "{% filter upper %}filtered {{ 'x' }}{% endfilter %}{% generation %}{{ 'said' }}{% endgeneration %}"
    "{% block a %}block{% endblock %}",
    "{{ tools is none }} {{ bos_token is defined }} {{ messages is iterable }} {{ strftime_now('%Y') }} "
    "{{ nothing }} {{ messages[0].nothing }}",
    "  {% if true %}  \n  lstrip and trim\n  {% endif %}\n{#- comment -#}\n{{- 'a' -}}\n b {%- raw %}{{ raw }}{% endraw %}",
]


@pytest.mark.parametrize("source", USED)
def test_templates_render_as_in_the_reference(source):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [expected], _ = utils.render_jinja_template([CHAT], chat_template=source)
    assert render(source, documents=None, add_generation_prompt=False) == expected


def test_literals_are_what_a_template_can_write():
    literals = ChatTemplate("<a>{% if x == '<b>' %}{{ '<c>' + y }}{% endif %}{# <d> #}{{ '<' ~ 'e>' }}", "a.jinja").literals
    assert [token in literals for token in ("<a>", "<b>", "<c>", "<d>", "<e>")] == [True, True, True, False, False]


def test_what_a_template_refuses_is_in_its_own_words():
    with pytest.raises(Refusal, match="^the chat template refuses this conversation: no system messages, please$"):
        render("{{ raise_exception('no system messages,\n please') }}")


HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "endless macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "endless filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | select('in', 'x') | list }}{% endfor %}",
    "endless sorting": "{% for a in range(99999) %}{% set b = range(99999) | sort %}{% endfor %}",
    "macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "endless output": "{% for a in range(99999) %}{% for b in range(99999) %}some words{% endfor %}{% endfor %}",
    "endless block": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}words{% endfor %}{% endfor %}{% endset %}",
    "doubling +": "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling ~": "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling block": "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set y %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% set n.x = y %}"
    "{% endfor %}",
    "doubling nest": "{% set n = namespace(x=1, y=1) %}{% for a in range(99) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}"
    "{% endfor %}{{ n.x == n.y }}",
    "doubling tuple": "{% set n = namespace(x=1) %}{% for a in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} }}",
    "doubling dict": "{% set n = namespace(x=1, y=1) %}{% for a in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}"
    "{% set n.y = {1: n.y, 2: n.y} %}{% endfor %}{{ n.x == n.y }}",
    "doubling dict()": "{% set n = namespace(x={}) %}{% for a in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}"
    "{% endfor %}{{ n.x }}",
    "doubling varargs": "{% set n = namespace(x=1, y=1) %}{% macro m() %}{% set n.x = varargs %}{% endmacro %}"
    "{% macro k() %}{% set n.y = varargs %}{% endmacro %}"
    "{% for a in range(99) %}{{ m(n.x, n.x) }}{{ k(n.y, n.y) }}{% endfor %}{{ n.x == n.y }}",
    "slices": "{% set a = 'a' * 400000 %}{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + [a[1:]] %}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "repetition, reversed": "{{ 10 ** 10 * 'a' }}",
    "list repetition": "{{ ['a' * 9999] * 999999 }}",
    "printed list": "{{ ['a' * 99999] * 99999 }}",
    "list as text": "{{ (['a' * 9999] * 9999) | string }}",
    "list in text": "{{ 'x' ~ (['a' * 9999] * 9999) }}",
    "list in an error": "{{ raise_exception(['a' * 9999] * 9999) }}",
    "power": "{{ 10 ** 10 ** 10 }}{{ 7 ** (7 ** 9) }}",
    "squares": "{% set n = namespace(x=7) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "hexadecimal": "{{ ('f' * 99999) | int(0, 16) > 1 }}",
    "%d": "{{ '%10000000000d' % 1 }}",
    "%.d": "{{ '%.10000000000f' % 1 }}",
    "%*d": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "format_map": "{{ '{x:10000000000}'.format_map({'x': 1}) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "many formats": "{{ ('%s' * 99999) % ((('a' * 99999),) * 99999) }}",
    "slow format check": "{{ ('{' ~ ':' * 300000).format(1) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "center method": "{{ 'a'.center(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "json indent": "{{ [1] | tojson(indent=10000000000) }}",
    "json": "{{ (['a' * 99999] * 99999) | tojson }}",
    "indent": "{% set a = ('a\n' * 99999) | indent(100) %}{{ a | length }}",
    "replace": "{% set a = 'a' * 99999 %}{{ a.replace('a', a) }}",
    "replace nothing": "{% set a = 'a' * 99999 %}{{ a.replace('', a) }}",
    "replace filter": "{% set a = 'a' * 99999 %}{{ a | replace('', a) }}",
    "join": "{% set a = 'a' * 99999 %}{{ a.join(a) }}",
    "join filter": "{% set a = 'a' * 99999 %}{{ range(99999) | join(a) }}",
    "slow search": "{{ ('a' * 300000).rfind('b' ~ 'a' * 100000) }}",
    "big range": "{{ range(10 ** 9) | list }}",
    "many words": "{{ lipsum(99999) }}",
    "dates": "{{ strftime_now('%Y' * 1000) }}{{ strftime_now('%100000Y') }}",
    "wide dates": "{{ strftime_now('%10000000000Y') }}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "items": "{{ ''['__class__']['__mro__'] }}",
    "format attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "self": "{{ raise_exception.__self__.call }}",
    "mutation": "{{ messages.append(1) }}",
    "namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "file": "{% include 'tokenizer.json' %}",
    "import": "{% import 'os' as os %}",
    "undefined": "{{ nothing.here }}",
    "types": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
    "syntax": "{% for %}",
    "unknown tag": "{% launch %}",
    "deep source": "{{ " + "(" * 5000 + ")" * 5000,
    "deep blocks": "{% if 1 %}" * 2000,
    "long number": "{{ " + "9" * 9999 + " }}",
    "long source": "x" * 1_000_001,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name):
    with pytest.raises(TokenizerError, match="^a.jinja: ") as caught:
        render(HOSTILE[name])
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert not str(caught.value).endswith(": ")  # a MemoryError has no message: then it was stopped too late


def test_the_sandbox_gives_nothing_away():
    """What is not stopped is at least empty."""
    for source in ("messages.__class__", "raise_exception.__globals__", "namespace.__subclasses__", "cycler", "self.__init__"):
        assert render("{{ " + source + " }}") == ""


def test_fuel_is_enough_for_long_conversations_and_new_for_each():
    source = "{% for m in messages %}{% if messages | length == loop.index and messages is defined %}last{% endif %}"
    source += "{{ '<' + m.role + '>' + m.content | trim + '\n' }}{% if 'x' in m.content.split('y')[0] %}.{% endif %}{% endfor %}"
    chat = [{"role": "user", "content": "y"}] * 3000 + [{"role": "user", "content": "x" * 300_000}]
    template = ChatTemplate(source, "a.jinja")
    for _ in range(2):
        assert len(template.render({"messages": chat})) > 300_000

    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done", "a.jinja")
    with pytest.raises(TokenizerError, match="a.jinja: stopped: it loops or grows beyond any chat"):
        template.render({"n": 99999})
    assert template.render({"n": 9}) == "done"
