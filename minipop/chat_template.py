"""Chat templates: programs by strangers, run safely.

A chat template comes with a downloaded checkpoint and is jinja2 code. It runs in jinja2's sandbox, which keeps it from files and
from the inside of Python objects, and on a fuel budget, which keeps it from looping without end and from building giant strings.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from datetime import datetime
from typing import Any, Iterable

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.filters import do_indent, make_attrgetter
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from .errors import TokenizerError
from .tokenizer_files import one_line

MAX_SOURCE = 1_000_000  # characters; real templates have some thousands


class Refusal(TokenizerError):
    """The template called raise_exception: it does not want this conversation."""


class _TemplateStop(jinja2.TemplateError):
    """Raised inside a template: its own raise_exception, or the end of its fuel."""

    def __init__(self, message: str, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class ChatTemplate:
    """A chat template, compiled once. One that does not compile raises when it is rendered: its checkpoint can still be used.

    Attributes: literals, all the text the template can write on its own.
    """

    def __init__(self, source: str, origin: str):
        """origin: the file it stands in, for errors."""
        self.origin, self.literals = origin, source
        self._sandbox = _Sandbox()
        self._compiled: jinja2.Template | str  # or why not
        try:
            if len(source) > MAX_SOURCE:
                raise ValueError(f"{len(source)} characters are too many")
            tree = self._sandbox.parse(source)
            texts = [node.data for node in tree.find_all(nodes.TemplateData)]
            texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            self.literals = "\0".join(texts)  # NUL keeps two of them from forming a third
            self._compiled = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._compiled = f"line {error.lineno}: {one_line(error.message or '')}"
        except Exception as error:  # too deeply nested for the parser, a number too long, ...
            self._compiled = f"not a chat template: {type(error).__name__}: {one_line(error)}"

    def render(self, variables: dict) -> str:
        """Raises Refusal with the template's own words, or TokenizerError."""
        if isinstance(self._compiled, str):
            raise TokenizerError(f"{self.origin}: {self._compiled}")
        try:
            return self._sandbox.run(self._compiled, variables)
        except _TemplateStop as error:
            if error.refused:
                raise Refusal(f"the chat template refuses this conversation: {one_line(error)}") from None
            raise TokenizerError(f"{self.origin}: stopped: {one_line(error)}") from None
        except RecursionError:
            raise TokenizerError(f"{self.origin}: stopped: it calls itself without end") from None
        except Exception as error:  # whatever template code can raise: undefined names, wrong types, division by zero, ...
            raise TokenizerError(f"{self.origin}: failed on this conversation: {one_line(error)}") from None


class _MeteredCode(CodeGenerator):
    """jinja2's compiler, with a call to the meter where templates could otherwise loop or grow unseen."""

    def visit_For(self, node: nodes.For, frame) -> None:
        """Each round pays for the statements in its body."""
        size = 1 + sum(1 for _ in node.find_all(nodes.Node))
        meter = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
        tick = nodes.Call(meter, [nodes.Const(size, lineno=node.lineno)], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame) -> None:
        """a ~ b"""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame) -> None:
        """text[1:] makes a new text; text[1] and messages[0] make nothing."""
        if isinstance(node.arg, nodes.Slice):
            self._through("grown", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame) -> None:
        self._through("literal", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame) -> None:
        self._through("literal", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame) -> None:
        if node.ctx == "load":
            self._through("literal", super().visit_Tuple, node, frame)
        else:  # the left side of {% set a, b = ... %}
            super().visit_Tuple(node, frame)

    def _through(self, meter: str, visit, node, frame) -> None:
        self.write(f"environment.{meter}(")
        visit(node, frame)
        self.write(")")


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """{% set ns = namespace(found=false) %}: what a template may change inside a loop"""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # jinja2's prints all it holds
        return "<Namespace>"


_TEXT_METHODS = frozenset(
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace"
    " istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split"
    " splitlines startswith strip swapcase title upper".split()
)
_CONTAINER_METHODS = frozenset("copy count get index items keys values".split())
# jinja2's filters, less those that allocate by a number (center, wordwrap, ...) or that no chat template needs (urlize, ...);
# with each, what it costs for a character or element of what it is given
_FILTERS = dict.fromkeys("count d default first length list map reject rejectattr reverse select selectattr".split(), 0)
_FILTERS |= dict.fromkeys("abs capitalize e escape float int items last lower max min safe title trim truncate upper".split(), 1)
_FILTERS |= dict.fromkeys("dictsort groupby sort unique wordcount".split(), 10)
_COLLECTIONS = (list, tuple, set, frozenset, *(type(view) for view in ({}.keys(), {}.values(), {}.items())))
_FORMAT_FIELD = re.compile(r"%[^a-zA-Z%]*|\{[^{}]*\{?")
_BACKWARD_SEARCHES = frozenset(("rfind", "rindex", "rpartition", "rsplit"))


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a fuel budget.

    Ten units pay for a call, one for each statement in a round of a loop, one for each character that is written or built. What
    could build something large pays before it starts, so fuel bounds memory as it bounds time; a deadline covers what fuel is too
    coarse for. A real template uses some thousand units, and a few for each character of the conversation.
    """

    FUEL, FUEL_PER_CHARACTER, SECONDS = 1_000_000, 50, 10.0
    CALL_COST = 10
    MAX_INT_BITS = 4096

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        extensions = [_Generation, jinja2.ext.loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._output)
        self._lock = threading.RLock()
        self._fuel, self._deadline = 0, float("inf")
        self.globals = {
            "range": safe_range,
            "dict": self._dict,
            "namespace": _Namespace,
            "raise_exception": self._raise_exception,
            "strftime_now": self._strftime_now,
        }
        filters = {name: self._metered(self.filters[name], price) for name, price in _FILTERS.items()}
        own = {"tojson": self._tojson, "join": self._join, "replace": self._replace, "string": self._text, "indent": self._indent}
        self.filters = {**filters, **own, "format": self._format}
        self.tests = {name: self._metered(test, price=int(name == "in")) for name, test in self.tests.items()}

    def run(self, template: jinja2.Template, variables: dict) -> str:
        with self._lock:
            self._fuel = self.FUEL + self.FUEL_PER_CHARACTER * self._size(variables, limit=float("inf"))
            self._deadline = time.monotonic() + self.SECONDS
            try:
                parts = []
                for part in template.generate(variables):
                    self._spend(len(part))
                    parts.append(part)
                return "".join(parts)
            finally:
                self._fuel, self._deadline = 0, float("inf")  # jinja2 evaluates constants while compiling: not with our fuel

    # -- the meter

    def _spend(self, amount: int) -> None:
        self._fuel -= amount
        if self._fuel < 0:
            raise _TemplateStop("it loops or grows beyond any chat; use another template")
        if time.monotonic() > self._deadline:
            raise _TemplateStop(f"it takes longer than {self.SECONDS:.0f} seconds; use another template")

    def _size(self, value: Any, limit: float | None = None) -> int:
        """About the number of characters a value has as text. Raises _TemplateStop if that is more than limit (the fuel)."""
        limit = self._fuel if limit is None else limit
        total, waiting = 0, [value]
        while waiting:
            value = waiting.pop()
            total += len(value) if isinstance(value, str) else 8
            if total > limit:
                self._spend(total)
            if isinstance(value, dict):
                waiting += [*value.keys(), *value.values()]
            elif isinstance(value, _COLLECTIONS):
                waiting += value
        return total

    @staticmethod
    def _length(value: Any) -> int:
        return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 1

    def _metered(self, function, price: int):
        @functools.wraps(function)  # also copies jinja2's marks for "wants the context"
        def call(*args, **kwargs):
            self._spend(self.CALL_COST + price * sum(map(self._length, args)))
            return self.grown(function(*args, **kwargs))

        return call

    # -- what compiled templates call

    def tick(self, amount: int) -> bool:
        self._spend(amount)
        return True

    def grown(self, value: Any) -> Any:
        """A new value, no larger than a few times those it was made from."""
        self._spend(self._length(value))
        if isinstance(value, int) and value.bit_length() > self.MAX_INT_BITS:
            raise _TemplateStop("a number grows beyond any chat; use another template")
        return value

    def literal(self, value: Any) -> Any:
        self._spend(self._size(value))  # of all it holds: x = [x, x] over and over doubles what == has to compare
        return value

    def joined(self, values: Iterable[Any]) -> str:
        return "".join([self._text(value) for value in values])

    def concat(self, parts: Iterable[str]) -> str:
        """Macros and {% set %}...{% endset %} collect parts and join them here."""
        parts = list(parts)
        self._spend(sum(map(len, parts)))
        return "".join(parts)

    def _output(self, value: Any) -> Any:
        """{{ value }}, before it is made text"""
        if not isinstance(value, str):
            self._spend(self._size(value))
        return value

    def call(self, context, function, /, *args, **kwargs) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        self._spend(self.CALL_COST)
        if isinstance(function, Macro):
            self.literal([args, kwargs])  # it can get at them as the containers `varargs` and `kwargs`
        elif isinstance(owner, str):
            self._spend(len(owner))
            if name == "join" and args:
                args = ([self._text(part) if isinstance(part, str) else part for part in args[0]], *args[1:])
                self._spend(len(owner) * len(args[0]))
            elif name == "replace" and len(args) >= 2:
                self._check_replace(owner, args[0], args[1])
            elif name in _BACKWARD_SEARCHES and args and isinstance(args[0], str):  # Python's are slow for odd texts
                self._spend(len(owner) * len(args[0]))
        return self.grown(super().call(context, function, *args, **kwargs))

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self._spend(self._length(left) + self._length(right))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > self.MAX_INT_BITS:
                raise _TemplateStop("a number grows beyond any chat; use another template")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    self._spend(len(one) * max(other, 0))
        self._spend(1)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, (list, tuple, dict)):
            return attr in _CONTAINER_METHODS
        return not isinstance(obj, (int, float)) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any):
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args, **kwargs):
            self._check_format(value.__self__, [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    # -- globals and filters of our own

    def _raise_exception(self, message: Any) -> None:
        raise _TemplateStop(self._text(message), refused=True)

    @staticmethod
    def _strftime_now(form: str) -> str:
        if len(form) > 200 or re.search(r"\d{3}", form):
            raise _TemplateStop("strftime_now: that is no date format")
        return datetime.now().strftime(form)

    def _dict(self, /, *args, **kwargs) -> dict:
        return self.literal(dict(*args, **kwargs))

    def _text(self, value: Any) -> str:
        self._spend(self._size(value))
        return str(value)

    def _tojson(self, value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        """json.dumps, not jinja2's tojson, which escapes for HTML."""
        if (len(indent) if isinstance(indent, str) else indent or 0) > 100:
            raise _TemplateStop("tojson: too wide an indent")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        parts = []
        for part in encoder.iterencode(value):
            self._spend(len(part))
            parts.append(part)
        return "".join(parts)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = list(value)
        if attribute is not None:
            items = list(map(make_attrgetter(self, attribute), items))
        self._spend(len(str(d)) * len(items))
        return str(d).join([self._text(item) for item in items])

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = self._text(value)
        self._check_replace(text, str(old), str(new))
        return text.replace(str(old), str(new), -1 if count is None else count)

    def _check_replace(self, text: str, old: str, new: str) -> None:
        self._spend(len(text) + text.count(old) * len(new))

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        width = width if isinstance(width, str) else min(width, 100)
        text = self._text(value)
        self._spend(len(text.splitlines()) * (len(width) if isinstance(width, str) else width))
        return do_indent(text, width, first, blank)

    def _format(self, value: Any, *args, **kwargs) -> str:
        """'%s ...' | format(...)"""
        text = self._text(value)
        self._check_format(text, [args, kwargs])
        return text % (kwargs or args)

    def _check_format(self, form: str, values: Any) -> None:
        """Both kinds of format string can pad a field to any width, and can name a value many times."""
        for field in _FORMAT_FIELD.findall(form):
            taken_from_a_value = "*" in field if field[0] == "%" else ":" in field and field.endswith("{")
            if taken_from_a_value or re.search(r"\d{4}", field):
                raise _TemplateStop("a format asks for too wide a field")
        fields = form.count("%") + form.count("{")
        self._spend(len(form) + fields * (1000 + self._size(values)))
