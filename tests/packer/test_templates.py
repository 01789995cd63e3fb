"""The sandbox of chat templates, and marks."""

import json

import jinja2.sandbox
import jinja2.utils
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.render.templates import (
    GENERATION_CLOSE,
    GENERATION_OPEN,
    ChatTemplate,
    Mark,
    RenderError,
    RowProblem,
    _environment,
    point,
    unmark,
    unpoint,
)

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def render(source, messages=(), tools=None, **options):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(list(messages), tools, **options)


@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cn"])),
    places=st.lists(st.integers(0, 200), max_size=5),
)
def test_unmark_gives_the_text_and_where_marks_were(text, places):
    places = sorted(min(place, len(text)) for place in places)
    marked, at = "", 0
    for index, place in enumerate(places):
        marked += text[at:place] + point(index * 37)
        at = place
    plain, marks = unmark(marked + text[at:])
    assert plain == text
    assert marks == [Mark("", index * 37, place) for index, place in enumerate(places)]


def test_a_mark_that_was_taken_apart_is_told():
    with pytest.raises(RowProblem, match="apart"):
        unmark(point(12)[:-1])


def test_generation_blocks_are_marked():
    raw = render("a{% generation %}b{% endgeneration %}c{%- generation -%} d {%- endgeneration %}")
    assert raw.count(GENERATION_OPEN) == raw.count(GENERATION_CLOSE) == 2
    assert unmark(raw)[0] == "abcd"
    assert [mark.position for mark in unmark(raw)[1]] == [1, 2, 3, 4]


@given(value=JSON)
def test_tojson_is_as_in_transformers(value):
    assert render("{{ messages[0] | tojson }}", [value]) == json.dumps(value, ensure_ascii=False)
    assert render("{{ messages[0] | tojson(indent=2) }}", [value]) == json.dumps(
        value, ensure_ascii=False, indent=2
    )


def test_what_templates_use():
    assert (
        render(
            "{% for m in messages %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", [1, 2, 3]
        )
        == "13"
    )
    assert render("{% for m in messages %}{% break %}{% endfor %}{{ bos_token }}", [1]) == "<s>"
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert render("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ dict(b=3).b }}") == "23"
    assert render("{{ add_generation_prompt }}{{ tools is none }}", generation_prompt=True) == "TrueTrue"
    assert render("{{ messages[0].get('a') }}{{ messages[0].items() | list }}", [{"a": 1}]) == "1[('a', 1)]"
    assert render("{{ messages[0].items_ is defined }}{{ messages[0].content }}", [{"a": 1}]) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=2) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ range(10 ** 9) | length }}",
        "{{ raise_exception('no') }}",
        "{{ 'a' + none_such }}",
        "{{ 1 / 0 }}",
    ],
)
def test_the_sandbox_and_failures_are_problems_of_the_row(source):
    with pytest.raises(RowProblem, match="the chat template refuses the row: "):
        render(source, [{"a": 1}])


def test_tool_use_template_for_rows_with_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([], None) == "plain"
    assert template.render([], [{}]) == "tools"
    with pytest.raises(RenderError, match="only templates named rag"):
        ChatTemplate({"rag": "x"}, {})


_OBJECTS = {
    "text": "some Text",
    "key": {"role": "user", "items": 1, "a b": 2},
    "ns": jinja2.utils.Namespace(found=3, _hidden=4),
    "many": [1, 2],
}
_NAMES = [
    "role",
    "items",
    "a b",
    "found",
    "missing",
    "_hidden",
    "__class__",
    "__init__",
    "format",
    "format_map",
    "append",
]


@pytest.mark.parametrize("name", [*_NAMES, *(name for name in dir(str) if not name.startswith("_"))])
@pytest.mark.parametrize("what", list(_OBJECTS))
def test_the_short_way_to_attributes_is_the_sandboxs(what, name):
    short, long = _environment(), jinja2.sandbox.ImmutableSandboxedEnvironment()
    found, wanted = (env.getattr(_OBJECTS[what], name) for env in (short, long))
    if isinstance(wanted, jinja2.Undefined):
        assert type(found) is type(wanted)
        assert found._undefined_exception == wanted._undefined_exception
    elif callable(wanted):  # bound anew at each look
        assert found.__name__ == wanted.__name__
        assert type(found) is type(wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.role }}{{ m.items }}{{ m.nothing }}{{ m['a b'] }}{{ ns.found }}{{ ns.nothing is defined }}",
        "{% for x in many %}{{ loop.index0 }}{{ loop.last }}{{ loop.previtem }}{% endfor %}{{ loop.first }}",
        "{% set loop = m %}{{ loop.role }}{{ loop.index }}",
        "{{ text.upper() }}{{ text.split('e')[-1].strip('t') }}{{ '{:>9}'.format(text) }}",
        "{% for x in many if m.role == 'user' %}{{ x }}{{ loop.length }}{% endfor %}{{ text.missing() }}",
        "{% macro f(a) %}{{ a.role }}{{ a.text.upper() }}{% endmacro %}{{ f(m) }}{{ m.__class__ }}",
        "{{ text.format_map({}) }}{{ many.append(3) }}",
        "{{ many | map(attribute='real') | join }}{{ (m.role + text).upper() }}{{ m.role.nothing.more }}",
    ],
)
def test_compiled_templates_print_what_the_sandbox_prints(source):
    values = {
        "m": {"role": "user", "items": 1, "a b": 2, "text": "ß"},
        "many": [1, 2],
        "text": "Meet",
        "ns": None,
    }
    values["ns"] = jinja2.utils.Namespace(found=3)
    found, wanted = [], []
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for environment, results in ((_environment(), found), (sandbox, wanted)):
        try:
            results.append(environment.from_string(source).render(**values))
        except Exception as error:
            results += [type(error), str(error)]
    assert found == wanted


@given(st.lists(st.tuples(st.integers(0, 300), st.text(st.characters(exclude_categories=["Cs", "Cn"])))))
def test_unpoint_is_unmark_where_all_marks_are_points(parts):
    marked = "start" + "".join(point(index) + text for index, text in parts)
    plain, marks = unmark(marked)
    assert unpoint(marked) == (plain, [(mark.message, mark.position) for mark in marks])
    with pytest.raises(ValueError, match="taken apart"):
        unpoint(marked + point(7)[:-1])
