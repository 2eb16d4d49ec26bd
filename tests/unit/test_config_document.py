from __future__ import annotations

from textwrap import dedent

from millstream.config.document import Tree, read_document


def read(text: str, **environment: str) -> tuple[Tree | None, list[str]]:
    tree, problems = read_document(dedent(text), "f.yaml", environment)
    return tree, [str(problem) for problem in problems]


def value(text: str, **environment: str) -> object:
    tree, problems = read(text, **environment)
    assert problems == []
    assert tree is not None
    return tree.value


def test_every_value_and_key_knows_its_place() -> None:
    tree, _ = read("name: shop\nsource:\n  tables: [a.b,\n    c.d]\n")
    assert tree is not None
    assert tree.place(("name",)) == (1, 7)
    assert tree.place(("name",), of_key=True) == (1, 1)
    assert tree.place(("source", "tables", 1)) == (4, 5)
    assert tree.place(("source", "missing")) == (3, 3)


def test_variables_expand_inside_values() -> None:
    text = "uri: postgresql://${HOST}:${PORT:-5432}/x\nempty: '${NONE:-}'\nliteral: $${HOST} costs $5\n"
    assert value(text, HOST="db") == {
        "uri": "postgresql://db:5432/x",
        "empty": "",
        "literal": "${HOST} costs $5",
    }


def test_a_default_stands_in_for_an_empty_variable() -> None:
    assert value("a: ${V:-x}\nb: '${V}'", V="") == {"a": "x", "b": ""}


def test_a_plain_value_gets_its_type_after_expansion_and_a_quoted_one_stays_text() -> None:
    assert value("a: ${N}\nb: '${N}'\nc: ${B:-true}", N="5") == {"a": 5, "b": "5", "c": True}


def test_a_variable_cannot_add_keys() -> None:
    assert value("a: ${V}", V="x\nb: y") == {"a": "x\nb: y"}
    assert value("a: ${V}", V="{b: y}") == {"a": "{b: y}"}


def test_an_unset_variable_is_named_with_its_line() -> None:
    _, problems = read("""a: 1\nb: [x, '${NOPE}', "${ALSO}"]\n""")
    assert problems == [
        "f.yaml:2:8: the variable NOPE is not set; set it, or write ${NOPE:-default}",
        "f.yaml:2:19: the variable ALSO is not set; set it, or write ${ALSO:-default}",
    ]


def test_a_broken_variable_is_a_problem() -> None:
    _, problems = read("a: 'x${1}'\n")
    assert problems == ["f.yaml:1:4: `${` does not begin a variable; write ${NAME}, ${NAME:-default}, or $${ for `${`"]


def test_a_key_that_is_given_twice_is_refused() -> None:
    _, problems = read("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert problems == [
        "f.yaml:4:3: `c` is given twice, first on line 3; keep one of the two",
        "f.yaml:5:1: `a` is given twice, first on line 1; keep one of the two",
    ]


def test_anchors_and_merges_work() -> None:
    text = """\
        base: &base {kind: files, batch: {max_ms: 5s}}
        one: {<<: *base, kind: delta}
        two: {name: x, <<: [*base, {name: y, extra: 1}]}
        """
    assert value(text) == {
        "base": {"kind": "files", "batch": {"max_ms": "5s"}},
        "one": {"kind": "delta", "batch": {"max_ms": "5s"}},
        "two": {"name": "x", "kind": "files", "batch": {"max_ms": "5s"}, "extra": 1},
    }


def test_an_alias_inside_its_own_anchor_is_a_problem() -> None:
    _, problems = read("a: &a [1, *a]\n")
    assert problems == ["f.yaml:1:4: an alias refers to what it stands in"]


def test_aliases_of_aliases_do_not_grow() -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 40)]
    tree, problems = read("\n".join(lines))
    assert problems == []
    assert tree is not None
    assert tree.value["l39"][0][0] is tree.value["l37"]


def test_objects_are_not_made_from_a_file() -> None:
    _, problems = read("a: !!python/object/apply:os.system ['true']\nb: !!python/name:os.system x\n")
    assert [problem.split(":")[1] for problem in problems] == ["2"]


def test_syntax_errors_have_a_place() -> None:
    assert read("a: [1, 2\nb: 3\n") == (
        None,
        ["f.yaml:2:2: not valid YAML: expected ',' or ']', but got ':'; check indentation, quotes and brackets"],
    )
    assert read("a: 1\n---\nb: 2\n")[1] == ["f.yaml:2:1: more than one document; put several streams under `streams:`"]
    assert read("# nothing\n")[1] == [
        "f.yaml:1:1: the file is empty; a stream file has the keys name, source, mode and targets"
    ]
    assert read("a: b\nc: \x00\n")[1][0].startswith("f.yaml:2:4: not text:")


def test_an_unquoted_variable_inside_brackets_is_explained() -> None:
    _, problems = read("a: 1\nt: {path: ${DIR}/x}\n", DIR="d")
    assert problems[0].startswith("f.yaml:2:12: not valid YAML: ")
    assert problems[0].endswith("; inside [ ] and { } put a value with ${...} in quotes")


def test_keys_are_words_as_written() -> None:
    assert value("on: 1\n2: x\n") == {"on": 1, "2": "x"}
    assert read("? [a]\n: 1\n")[1] == ["f.yaml:1:3: a key must be a word"]
