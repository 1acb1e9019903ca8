#!/usr/bin/env python3
"""Templates with what transformers' jinja2 environment renders of them: jinja.json, which
formats/tests/template_jinja.rs reads. Needs jinja2 3.1.6.

    python3 tests/data/templates/generate.py > tests/data/templates/jinja.json
"""
import itertools
import json
import sys

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import SandboxedEnvironment

# Lists and dictionaries can be changed, as in llama.cpp: published templates do so.
ENVIRONMENT = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT.filters["tojson"] = tojson

VALUES = {
    "word": "zebra", "text": "  The quick,brown fox\tjumps\nover  ", "title": "war AND peace", "empty": "",
    "unicode": "Straße é 日本", "path": "a/b/c.txt", "digits": "0042", "list": [3, 1, 2], "names": ["b", "A", "c", "a"],
    "nested": [[1, 2], [3, 4]], "pairs": {"b": 1, "A": 2, "c": 0}, "rows": [
        {"name": "x", "kind": "p", "n": 2}, {"name": "y", "kind": "q", "n": 1}, {"name": "z", "kind": "p", "n": 3}],
    "n": 7, "negative": -7, "pi": 3.14159, "whole": 4.0, "big": 12345678901234567890, "yes": True, "no": False,
    "nothing": None, "html": "<p>a &amp; <b>b</b></p>", "long": "the quick brown fox jumps over the lazy dog again and again",
}

METHODS = {
    "word": "upper() lower() capitalize() title() swapcase() casefold() center(9) center(9,'*') ljust(8,'.') rjust(8,'.')"
            " zfill(8) find('b') find('q') rfind('a') index('b') rindex('a') count('a') count('') startswith('ze')"
            " startswith(('a','z')) endswith('ra') endswith(('x','bra')) startswith('b',2) endswith('b',0,3) find('a',1,3)"
            " removeprefix('ze') removesuffix('bra') partition('b') rpartition('b') partition('q') rpartition('q')"
            " replace('a','o') replace('a','o',1) replace('','-') isalpha() isdigit() isalnum() isascii() islower() isupper()"
            " isspace() isnumeric() isdecimal() isidentifier() isprintable() istitle() encode() strip('za') lstrip('z')"
            " rstrip('ar') split('b') rsplit('b') split() join(['1','2']) join('ab') expandtabs() index('q') upper().lower()",
    "text": "strip() lstrip() rstrip() split() split(' ') split(None,1) split(' ',2) rsplit() rsplit(None,1) rsplit(' ',1)"
            " split(maxsplit=1) rsplit(sep=',',maxsplit=1) splitlines() splitlines(true) expandtabs(4) title() swapcase()"
            " replace('\\n',' ') isspace() partition(',') count('  ')",
    "unicode": "upper() lower() casefold() title() capitalize() isascii() isalpha() zfill(12) center(15,'é') find('é') split()",
    "title": "title() istitle() swapcase() capitalize() split('AND') upper().isupper()",
    "digits": "isdigit() isdecimal() isnumeric() lstrip('0') zfill(2) zfill(6)",
    "path": "split('/') rsplit('/',1) rsplit('/',1)[-1] split('/')[-1].split('.')[0] rpartition('.') splitlines() split('/')[::-1]",
    "empty": "split() split(',') splitlines() isalpha() islower() isspace() title() partition('a') join([])",
    "list": "index(1) index(2,1) index(9) count(1) copy()",
    "names": "index('A') count('a') copy()",
    "pairs": "get('b') get('q') get('q',5) copy() items()|list keys()|list values()|list",
    "n": "bit_length()", "whole": "is_integer()",
}

FILTERS = {
    "word": "upper lower capitalize title length count first last list reverse trim trim('za') center(11) string escape e forceescape"
            " replace('a','o') replace('a','o',1) default('x') d('x') indent truncate(3) truncate(3,true) truncate(4,true,'') wordcount"
            " format safe int float int(5) tojson pprint batch(2)|list slice(2)|list sort|list unique|list join('-')"
            " urlencode",
    "text": "trim upper title wordcount replace('\\n','\\\\n') striptags capitalize indent(2) indent(2,true) indent('>>',first=true)"
            " indent(width=3,blank=true) length",
    "long": "truncate(20) truncate(20,true) truncate(20,false,'…') truncate(20,true,'..',0) wordwrap(12) wordwrap(12,false)"
            " wordwrap(3) wordwrap(3,false) wordwrap(width=20,wrapstring='|') wordcount center(70) truncate(56) truncate(55)",
    "html": "striptags escape forceescape e|string safe|escape xmlattr",
    "list": "sort|list sort(reverse=true) sort(true) sum sum(start=4) min max first last length join join(',') join('-')|upper reverse|list"
            " map('string')|list map('float')|list batch(2)|list batch(2,'x')|list slice(2)|list slice(2,'x')|list select('odd')|list"
            " reject('odd')|list select('greaterthan',1)|list unique|list tojson tojson(indent=2) string pprint list",
    "names": "sort sort(case_sensitive=true) sort(false,true) sort(reverse=true) unique|list unique(true)|list min max min(true) join('+')"
             " map('upper')|list map('replace','a','o')|list select('lower')|list reject('in',['a'])|list",
    "nested": "sum(start=[]) map('first')|list map('sum')|list map('join','-')|list tojson first|last",
    "pairs": "dictsort dictsort(true) dictsort(by='value') dictsort(false,'value') dictsort(case_sensitive=true,by='key',reverse=true)"
            " dictsort(reverse=true) items|list list length tojson tojson(sort_keys=true) tojson(indent=2) xmlattr xmlattr(false) first"
            " urlencode join(',') string",
    "rows": "map(attribute='name')|list map(attribute='q',default='-')|list selectattr('kind')|list selectattr('kind','equalto','p')|list|length"
            " rejectattr('n','gt',1)|map(attribute='name')|join sort(attribute='n')|map(attribute='name')|join"
            " sort(attribute='kind,n')|map(attribute='name')|join sort(attribute='n',reverse=true)|map(attribute='name')|join"
            " sum(attribute='n') sum('n') groupby('kind')|map('first')|list groupby('kind')|map(attribute='list')|map('length')|list"
            " join(',',attribute='name') join(',','name') min(attribute='n') max(attribute='n') unique(attribute='kind')|map(attribute='name')|list"
            " map('length')|list first tojson",
    "n": "abs float int string round default(1) filesizeformat tojson e",
    "negative": "abs string", "pi": "round round(2) round(1,'ceil') round(2,'floor') int string float tojson round(2)|string",
    "whole": "int string round tojson", "big": "string tojson filesizeformat int",
    "yes": "string int default('x') tojson", "no": "default('x') default('x',true) string",
    "nothing": "default('x') default('x',true) string tojson", "empty": "default('x') default('x',true) first last length upper",
    "missing": "default('x') d list length join upper string", "digits": "int int(base=8) float",
}

EXPRESSIONS = """
1 + 2 * 3 ** 2
2 ** -1
-2 ** 2
7 // 2
-7 // 2
7 % 3
-7 % 3
7 / 2
6 / 2
7.5 // 2
'a' ~ 1 ~ none ~ true
'a' * 3
[1] * 2
[1] + [2]
(1, 2) + (3,)
(1,)
()
(1, 'a', none, 2.0)
1 < 2 < 3
1 < 2 > 3
1 == 1.0
1 == true
'1' == 1
none == false
[1, 2] == [1, 2]
(1, 2) == [1, 2]
{'a': 1} == {'a': 1}
not none
not []
not ''
1 in [1]
'b' in pairs
'eb' in word
4 not in list
'x' if no
'x' if no else 'y'
('x' if no) is defined
word[0]
word[-1]
word[1:3]
word[::-1]
word[:-1]
word[10:]
list[::2]
list[-2:]
list[1]
list[9]
list[9] is defined
nested[0][1]
pairs['b']
pairs.b
pairs.missing
pairs.missing is defined
pairs['missing'] is undefined
missing is defined
missing.attribute is defined
none is none
yes is boolean
n is integer
pi is float
word is string
list is iterable
pairs is mapping
list is sequence
n is divisibleby 7
n is divisibleby(3)
n is odd
n is even
n is eq 7
n is sameas 7
word is lower
'A' is upper
word is in ['zebra']
n is not odd
yes is true
no is false
yes is number
list is mapping
word is callable
'upper' is filter
'odd' is test
word is escaped
true and 0
0 or 'x'
none or false
1 and 2 or 3
'%s' % word
'%r' % word
'%r and %s' % (word, list)
'%5s|%-5s|%05d' % ('a', 'b', 42)
'%(a)s-%(b)d' % {'a': 1, 'b': 2}
'%.3f %e %g' % (pi, pi, pi)
'%x %X %o %c' % (255, 255, 8, 'z')
'%%' % ()
'%s' % none
'%s' % [1, 'a']
'%d' % 3.9
'%+d % d' % (3, 4)
'{} {}'.format(1, 'a')
'{0} {1} {0}'.format(1, 'a')
'{a}-{b:>4}'.format(a=1, b='x')
'{:05.1f}'.format(pi)
range(3)|list
range(1, 4)|list
range(10, 0, -3)|list
dict(a=1, b=2)
dict(pairs, z=1)
namespace(a=1).a
[true, false, none]
[1.0, 1e20, 1e-7, 0.1]
{'a': [1, {'b': none}]}
"it's"
["it's", 'a"b', 'a\\\\b', 'a\\nb']
['é', '日']
1_000
0x1f
0b11
0o17
1e3
12345678901234567890
'a' 'b'
'a' < 'b'
[1, 2] < [1, 3]
(list|length > 2) and (word|upper == 'ZEBRA')
(1 if yes) + 1
pairs.items()|list|first
word.upper()[0]
names|map('upper')|join(', ')
pairs|dictsort|map('last')|list
list|sort|first
(n ~ '')|length
cycler('a','b').next()
rows|selectattr('n', '>', 1)|map(attribute='name')|join(',')
rows|map(attribute='name')|map('upper')|list
rows[0]|items|list
[1,2,3]|map('multiply', 2)|list
nothing.x
missing.x.y
missing[0]
missing ~ 'a'
missing + 'a'
missing()
word.nosuch
word.nosuch()
'a'|nosuch
1 + 'a'
'a' + 1
[1] + 'a'
{} + {}
1 / 0
pairs['b'] + 1
pairs.get('b', 0) + 1
pairs.keys()|list == ['b', 'A', 'c']
word.__class__
''.__class__.__mro__
""".strip().splitlines()

STATEMENTS = [
    "{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}",
    "{% for x in list if x > 1 %}{{ loop.index }}:{{ x }} {% else %}none{% endfor %}",
    "{% for x in [] %}{% else %}empty{% endfor %}",
    "{% for k, v in pairs.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in pairs|dictsort %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in pairs %}{{ k }}{% endfor %}",
    "{% for c in word %}{{ loop.cycle('a', 'b') }}{{ c }}{% endfor %}",
    "{% for x in list %}{% if loop.changed(x > 1) %}!{% endif %}{{ x }}{% endfor %}",
    "{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in list %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in nested recursive %}{% if x is iterable %}[{{ loop(x) }}]{% else %}{{ x }}{{ loop.depth }}{% endif %}{% endfor %}",
    "{% for a, b in nested %}{{ a }}{{ b }}{% endfor %}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% set x = 1 %}{% for y in list %}{% set x = y %}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=1) %}{% for y in list %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set x %}a{{ n }}b{% endset %}{{ x|upper }}",
    "{% set x | upper %}a{{ n }}b{% endset %}{{ x }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=5, a=4) }}{{ m() }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, k=4) }}{{ m(1) }}",
    "{% macro m() %}{{ varargs|length }}{% for v in varargs %}<{{ v }}>{% endfor %}{% endmacro %}{{ m() }}{{ m('a', 'b') }}",
    "{% macro m(a) %}{{ kwargs.get('k', 'none') }}{% endmacro %}{{ m(1, k='v') }}{{ m(1) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(x) %}[{{ caller() }}{{ x }}]{% endmacro %}{% call m(1) %}in{% endcall %}",
    "{% macro m(x) %}{{ caller(x, 2) }}{% endmacro %}{% call(a, b) m(1) %}{{ a }}{{ b }}{% endcall %}",
    "{% macro fact(x) %}{{ x if x < 2 else x * (fact(x - 1)|int) }}{% endmacro %}{{ fact(5) }}",
    "{% filter upper %}a{{ word }}{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}",
    "{% if missing %}a{% elif n > 5 %}b{% else %}c{% endif %}",
    "{# comment #}a{#- trimmed -#} b",
    "a  {%- if yes -%}  b  {%- endif -%}  c",
    "a\n  {% if yes %}\nb\n  {% endif %}\nc\n",
    "a\n  {%+ if yes %}\nb\n  {%+ endif %}\nc\n\n",
    "a {{- n -}} b\n",
    "{% if yes -%}\n\n  x\n{%- endif %}\n\ny",
    "{% if yes +%}\nx{% endif +%}\ny",
    "a\r\nb{% if yes %}\r\nc\r\n{% endif %}\r\nd\r\n",
    "a\rb{{ 'x\r\ny' }}\r",
    "{% raw %}\n{{ a }}\n{% endraw %}\nb",
    "{% raw -%}\n {{ a }} \n{%- endraw %}\nb",
    "a\n  {% raw %}{% if %}{% endraw %}\nb",
    "  {%- raw %} {{ '%s' % 1 }} {% endraw -%}  b",
    "{% set l = [] %}{% set _ = l.append(1) %}{% set _ = l.append('a') %}{{ l }}{{ l|length }}",
    "{% set l = [1, 2, 3] %}{{ l.pop() }}{{ l.pop(0) }}{{ l }}",
    "{% set l = [3, 1, 2] %}{{ l.sort() }}{{ l }}{{ l.reverse() }}{{ l }}{{ l.sort(reverse=true) }}{{ l }}",
    "{% set l = [1] %}{{ l.extend([2, 3]) }}{{ l.insert(0, 'x') }}{{ l.insert(-1, 'y') }}{{ l.insert(99, 'z') }}{{ l }}{{ l.remove('y') }}{{ l }}{{ l.clear() }}{{ l }}",
    "{% set ns = namespace(ids=[]) %}{% for x in list %}{% set _ = ns.ids.append(x) %}{% endfor %}{{ ns.ids }}{{ ns.ids.pop(0) }}{{ ns.ids|tojson }}",
    "{% set d = {} %}{% set _ = d.update({'a': 1}) %}{% set _ = d.update(b=2) %}{{ d }}{{ d.pop('a') }}{{ d.pop('q', 5) }}{{ d }}{{ d.setdefault('c', []).append(1) }}{{ d }}",
    "{% set d = {'a': 1, 'b': 2} %}{{ d.popitem() }}{{ d }}{{ d.clear() }}{{ d }}{{ d.get('a') is none }}",
    "{% set a = [1] %}{% set b = a %}{% set c = a.copy() %}{{ a.append(2) }}{{ b }}{{ c }}",
    "{% set l = [] %}{% for x in list %}{{ l.append(x * 2) or '' }}{% endfor %}{{ l|join(',') }}{{ 4 in l }}{{ l[0] }}{{ l[-1:] }}{{ l == [6, 2, 4] }}{{ l + [1] }}",
    "{% set l = list + [9] %}{{ l.append(5) }}{{ l }}{{ list }}",
    "{% set l = word|list %}{{ l.append('!') }}{{ l|join }}",
    "{% set l = 'a b c'.split(' ') %}{{ l.pop() }}{{ l }}",
    "{% set l = list[:2] %}{{ l.append(1) }}{{ l }}",
    "{% set m = {'l': [1, 2], 'd': {'x': [] }} %}{{ m.l.append(3) }}{{ m.d.x.append(4) }}{{ m }}",
    "{{ rows[0].update({'name': 'changed'}) }}{{ rows[0].name }}{{ names.pop() }}{{ names }}",
    "{% macro add(l, x) %}{{ l.append(x) or '' }}{% endmacro %}{% set q = [] %}{{ add(q, 1) }}{{ add(q, 2) }}{{ q }}",
    "{% set l = [1] %}{{ l.pop() }}{{ l.pop() }}",
    "{% set l = [1] %}{{ l.remove(5) }}",
    "{% set d = {} %}{{ d.pop('x') }}",
    "{% set j = joiner(', ') %}{% for x in list %}{{ j() }}{{ x }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
    "{% set x = {'a': 1}.a %}{{ x }}{{ {'a': [1, 2]}['a'][1] }}{{ [1, 2][0] }}{{ 'ab'[1] }}{{ (1, 2)[1] }}",
    "{% if [] == list[3:] and [1] != [] %}{{ [n, [n]][1][0] }}{% endif %}{{ [] if no else [1] }}{{ n in [7] and not [] }}",
    "{% set t = (1, 2) %}{{ t }}{{ t[0] }}{{ t|list }}{{ t is sequence }}",
    "{% set d = dict(x=1) %}{{ d.update(y=2) }}{{ d }}",
]


def render(source):
    try:
        text = ENVIRONMENT.from_string(source).render(**json.loads(json.dumps(VALUES)))
    except Exception as error:  # What it refuses, we refuse.
        return None
    return None if " object at 0x" in text or "<generator" in text or "<function" in text or "<built-in" in text else text


def sources():
    yield from STATEMENTS
    for name, methods in METHODS.items():
        for method in methods.split(" ") if "('" not in methods else split(methods):
            yield "{{ %s.%s }}" % (name, method)
    for name, filters in FILTERS.items():
        for chosen in split(filters):
            yield "{{ %s|%s }}" % (name, chosen)
    for expression in EXPRESSIONS:
        yield "{{ %s }}" % expression


def split(line):
    """At spaces outside of quotes."""
    word, quote = "", None
    for letter in line:
        if quote is None and letter == " ":
            if word:
                yield word
            word = ""
            continue
        if letter in "'\"":
            quote = letter if quote is None else None if quote == letter else quote
        word += letter
    if word:
        yield word


def main():
    cases = [[source, render(source)] for source in sources()]
    rows = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    sys.stdout.write('{"values": %s,\n"cases": [\n%s\n]}\n' % (json.dumps(VALUES, ensure_ascii=False), rows))


main()
