from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.config import StreamFileError, load_streams
from millstream.config.definition import definition
from millstream.config.kinds import TARGETS
from millstream.errors import ConfigError
from millstream.model import AckPolicy, BatchLimits, Mode, OnLimit, Retention, SourceSpec, StreamSpec, TargetSpec
from tests.fixtures.stream_files import MINIMAL, Load, Problems, changed, stream_file


def test_a_small_file_gets_every_default(load: Load, tmp_path: Path) -> None:
    assert load(MINIMAL) == [
        StreamSpec(
            name="shop",
            source=SourceSpec(
                name="shop",
                kind="postgres",
                uri="postgresql://app@localhost:5432/shop",
                auth_ref=None,
                tables=("public.orders", "public.item_*"),
                ack=AckPolicy.DELIVERED,
                max_source_wal=4 << 30,
                on_limit=OnLimit.RELEASE,
                options={},
            ),
            mode=Mode.CDC,
            targets=(
                TargetSpec("log", "files", BatchLimits(5_000, 16 << 20, 500_000), True, {"path": f"{tmp_path}/log"}),
            ),
            commit="all",
            checkpoint_interval_ms=1000,
        )
    ]


def test_every_key_arrives(load: Load, tmp_path: Path) -> None:
    (stream,) = load("""\
        name: shop
        source:
          name: main
          kind: postgres
          uri: postgresql://app@localhost:${PORT}/shop?sslmode=require
          auth_ref: file:secrets/pw
          tables: [public.*]
          ack: journaled
          max_source_wal: 2GiB
          on_limit: stop
          retention: {age: 7d, bytes: 50GiB}
          slot: my_slot
          heartbeat_interval: 30s
        mode: cdc
        filter:
        transforms: []
        targets:
          - name: log
            kind: files
            path: /data/log
            format: parquet
            batch: {max_ms: 10s, max_bytes: 64MiB, max_events: 1000}
          - {name: spare, kind: files, path: ../spare, required: false, batch: {max_ms: 200ms}}
        commit: required
        conflict: source_wins
        checkpoint_interval: 500ms
        """, PORT="5433")  # fmt: skip
    assert stream.source == SourceSpec(
        name="main",
        kind="postgres",
        uri="postgresql://app@localhost:5433/shop?sslmode=require",
        auth_ref=f"file:{tmp_path}/secrets/pw",
        tables=("public.*",),
        ack=AckPolicy.JOURNALED,
        max_source_wal=2 << 30,
        on_limit=OnLimit.STOP,
        options={"slot": "my_slot", "heartbeat_interval": 30_000},
        retention=Retention(age_ms=7 * 86_400_000, bytes=50 << 30),
    )
    log, spare = stream.targets
    assert log == TargetSpec(
        "log", "files", BatchLimits(10_000, 64 << 20, 1000), True, {"path": "/data/log", "format": "parquet"}
    )
    assert spare.limits == BatchLimits(200, 16 << 20, 500_000)
    assert (spare.required, spare.options) == (False, {"path": f"{tmp_path}/../spare"})
    assert (stream.commit, stream.checkpoint_interval_ms) == ("required", 500)


def test_a_file_may_hold_several_streams_and_a_run_several_files(tmp_path: Path) -> None:
    one = json.dumps({"streams": [stream_file("a"), stream_file("b")]})
    (tmp_path / "one.yaml").write_text(one)
    (tmp_path / "two.yaml").write_text(json.dumps(stream_file("c")))
    streams = load_streams([tmp_path / "one.yaml", str(tmp_path / "two.yaml")])
    assert [stream.name for stream in streams] == ["a", "b", "c"]


def test_all_problems_come_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    found = problems("""\
        nam: x
        name: Shop
        source:
          kind: postgres
          uri: mysql://localhost/shop
          tabels: [public.orders]
          tables: [public.orders, orders]
          ack: delivred
          slott: foo
          max_source_wal: ${NOPE}
          heartbeat_interval: 10parsecs
          types: {tim: time, interval: strct}
        mode: cdcc
        targets:
          - {name: lake, kind: files, path: ./a, batch: {max_m: 10s, max_bytes: 0}}
          - {name: lake, kind: filez}
        commit: {quorum: 3}
        commit: all
        """)  # fmt: skip
    assert found == [
        "1:1: nam: unknown key; did you mean `name`?",
        "2:7: name: a name is lower case letters, digits, `_` and `-`, and begins with a letter",
        "5:8: source.uri: not a postgres URI; write postgresql://user@host:port/database",
        "6:3: source.tabels: unknown key; did you mean `tables`?",
        "7:27: source.tables[1]: not a table pattern: 'orders'; "
        'write schema.table, schema.*, public.item_* or "My Schema"."My Table"',
        "8:8: source.ack: `delivred` is not known; did you mean `delivered`? available: delivered, journaled",
        "9:3: source.slott: unknown key; did you mean `slot`?",
        "10:19: the variable NOPE is not set; set it, or write ${NOPE:-default}",
        "11:23: source.heartbeat_interval: unknown unit 'parsecs' in '10parsecs': expected a duration such as "
        "200ms, 10s, 5m or 1h (a bare number is milliseconds)",
        "12:11: source.types.tim: unknown key; did you mean `time`?",
        "12:32: source.types.interval: must be 'string' or 'struct'",
        "13:7: mode: `cdcc` is not known; did you mean `cdc`? available: cdc, snapshot, snapshot_then_cdc",
        "15:50: targets[0].batch.max_m: unknown key; did you mean `max_ms`?",
        "15:73: targets[0].batch.max_bytes: must be above 0",
        "16:12: targets[1].name: another target is named `lake`, on line 15; give it a name of its own",
        f"16:24: targets[1].kind: `filez` is not known; did you mean `files`? available: {', '.join(TARGETS)}",
        "17:18: commit.quorum: asks for 3 of 2 targets",
        "18:1: `commit` is given twice, first on line 17; keep one of the two",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "mode: cdc",
            "mode: snapshot\nverify: every 1h",
            "7:1: verify: has no meaning with `mode: snapshot`, which gets no changes; take it out, or write "
            "`mode: snapshot_then_cdc`",
        ),
        (
            "mode: cdc",
            "mode: cdc\nconflict: dest_wins",
            "7:11: conflict: `dest_wins` is not available in this version; available: source_wins",
        ),
        (
            "kind: files",
            "kind: iceberg, mirror: true",
            f"8:23: targets[0].kind: `iceberg` is not available in this version; available: {', '.join(TARGETS)}",
        ),
        (
            "kind: files",
            "kind: kafka",
            f"8:23: targets[0].kind: `kafka` is not available in this version; available: {', '.join(TARGETS)}",
        ),
        (
            "./log}",
            "./log, format: avro}",
            "8:51: targets[0].format: `avro` is not available in this version; available: parquet",
        ),
        (
            "kind: postgres",
            "kind: mysql\n  server_id: 7",
            "3:9: source.kind: `mysql` is not available in this version; available: postgres",
        ),
    ],
)
def test_what_is_not_built_yet_is_refused_by_name(problems: Problems, old: str, new: str, expected: str) -> None:
    assert problems(changed((old, new))) == [expected]


def test_where_the_kind_is_misspelt_the_other_keys_are_looked_at_all_the_same(
    problems: Problems,
) -> None:
    assert problems(changed(("kind: postgres", "kind: postgress"), ("  tables:", "  auth_reff: env:A\n  tables:"))) == [
        "3:9: source.kind: `postgress` is not known; did you mean `postgres`? available: postgres",
        "5:3: source.auth_reff: unknown key; did you mean `auth_ref`?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: shop\n", "", "1:1: name: is missing; write `name: shop`"),
        ("mode: cdc\n", "", "1:1: mode: is missing; write `mode: cdc`"),
        (
            '  tables: [public.orders, "public.item_*"]\n',
            "",
            "3:3: source.tables: is missing; write `tables: [public.orders]`, or `tables: [public.*]`",
        ),
        (", path: ./log", "", "8:5: targets[0].path: is missing; write `path: ./directory`"),
        (
            "kind: files, path: ./log",
            "kind: sqlite",
            "8:5: targets[0].path: is missing; write `path: ./copy.db`, a file",
        ),
        ("path: ./log", "path: 5", "8:36: targets[0].path: must be a path; write `path: ./directory`"),
        (
            "./log}",
            "./log, compression: zst}",
            "8:56: targets[0].compression: `zst` is not known; did you mean `zstd`? available: snappy, zstd, none",
        ),
        (
            '[public.orders, "public.item_*"]',
            "public.orders",
            "5:11: source.tables: must be a list; write [public.orders]",
        ),
        (
            '[public.orders, "public.item_*"]',
            "[]",
            "5:11: source.tables: the list is empty; name a table as schema.table, or all of a schema as schema.*",
        ),
        (
            '[public.orders, "public.item_*"]',
            "[a.b, c.d, a.b]",
            "5:11: source.tables: `a.b` is listed twice; keep one of the two",
        ),
        (
            "mode: cdc",
            "  retention: {}\nmode: cdc",
            "6:14: source.retention: no limit is given; "
            "write {age: 7d}, {bytes: 50GiB} or both; without limits leave it out",
        ),
        (
            "mode: cdc",
            "  retention: {ages: 7d}\nmode: cdc",
            "6:15: source.retention.ages: unknown key; did you mean `age`?",
        ),
        (
            "name: shop",
            "name: 7",
            "1:7: name: a name is lower case letters, digits, `_` and `-`, and begins with a letter",
        ),
        ("mode: cdc", "mode: cdc\ncommit: most", "7:9: commit: must be all, required or {quorum: N}"),
        (
            "mode: cdc",
            "mode: cdc\ncommit: {quorum: 0}",
            "7:9: commit: `quorum` is a whole number of targets, 1 or more",
        ),
        (
            "mode: cdc",
            "mode: cdc\ncheckpoint_interval: 0",
            "7:22: checkpoint_interval: must be above 0",
        ),
        (
            "./log}",
            "./log, required: false}",
            "8:53: targets[0].required: has no meaning without `commit: required`; "
            "write `commit: required` on the stream, or take it out",
        ),
        ("./log}", "./log, required: perhaps}", "8:53: targets[0].required: must be true or false"),
        ("./log}", "./log, batch: fast}", "8:50: targets[0].batch: must be a mapping of keys to values"),
    ],
)
def test_each_mistake_has_its_place_and_its_remedy(problems: Problems, old: str, new: str, expected: str) -> None:
    assert problems(changed((old, new))) == [expected]


def test_a_type_that_there_is_none_of_is_found_without_its_table(problems: Problems, load: Load) -> None:
    def with_casts(*casts: str) -> str:
        return changed(("mode: cdc", "\n".join(["mode: cdc", "transforms:", *(f"  - {one}" for one in casts)])))

    types = (
        "types: boolean, smallint, int, integer, bigint, long, float, double, string, binary, date, timestamp, "
        "timestamp_ntz, decimal(p,s)"
    )
    assert problems(
        with_casts("{cast: {id: string, total: strnig}, tables: [public.orders]}", "{cast: {total: 'decimal(40,2)'}}")
    ) == [
        "8:32: transforms[0].cast.total: `strnig` for total of public.orders is no type; "
        f"did you mean `string`? {types}",
        f"9:20: transforms[1].cast.total: `decimal(40,2)` for total of every table is no type; {types}",
    ]
    assert load(with_casts("{cast: {id: STRING, total: 'numeric(12, 2)'}}"))


def test_a_misspelt_kind_is_found_without_knowing_the_kind(problems: Problems) -> None:
    assert problems(changed(("kind: files", "knd: files"), ("kind: postgres", "kimd: postgres"))) == [
        "3:3: source.kind: is missing; write `kind: ...`",
        "3:3: source.kimd: unknown key; did you mean `kind`?",
        "8:5: targets[0].kind: is missing; write `kind: ...`",
        "8:17: targets[0].knd: unknown key; did you mean `kind`?",
    ]


def test_several_missing_keys_of_one_mapping_are_all_named(problems: Problems) -> None:
    found = problems("name: shop\nsource: {kind: postgres}\nmode: cdc\ntargets: []\n")
    assert [problem.split(": ")[1] for problem in found] == ["source.uri", "source.tables", "targets"]


def test_commit_required_needs_a_required_target(problems: Problems) -> None:
    text = changed(("./log}", "./log, required: false}"), ("mode: cdc", "mode: cdc\ncommit: required"))
    assert problems(text) == ["7:9: commit: no target is required; take `required: false` from one of them"]


def test_a_quorum_is_taken_when_it_can_be_reached(load: Load) -> None:
    text = MINIMAL + "  - {name: second, kind: files, path: ./second}\ncommit: {quorum: 2}\n"
    assert load(text)[0].commit == "quorum:2"


def test_names_and_directories_belong_to_one(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(json.dumps(stream_file("a")))
    (tmp_path / "two.yaml").write_text(json.dumps(stream_file("a")))
    with pytest.raises(StreamFileError) as raised:
        load_streams([tmp_path / "one.yaml", tmp_path / "two.yaml"])
    messages = [problem.message for problem in raised.value.problems]
    assert messages == [f"another stream is named `a`, at {tmp_path}/one.yaml:1", "target a/log writes there too"]


def test_streams_share_a_source_only_if_they_describe_it_alike(tmp_path: Path) -> None:
    same = {"streams": [stream_file("a", name="main"), stream_file("b", name="main")]}
    (tmp_path / "same.yaml").write_text(json.dumps(same))
    assert [stream.source.name for stream in load_streams([tmp_path / "same.yaml"])] == ["main", "main"]
    other = {"streams": [stream_file("a", name="main"), stream_file("b", name="main", ack="journaled")]}
    (tmp_path / "other.yaml").write_text(json.dumps(other))
    with pytest.raises(StreamFileError, match="stream `a` has another source of the name `main`"):
        load_streams([tmp_path / "other.yaml"])


def test_keys_beside_streams_are_refused(problems: Problems) -> None:
    found = problems("name: x\nstreams: []\n")
    assert found == [
        "1:1: name: stands beside `streams`; move it into the streams it belongs to",
        "2:10: streams: must be a list of streams",
    ]
    assert problems("- a\n") == ["1:1: a stream file is a mapping; begin with `name: ...`"]
    assert problems("streams: [7]\n") == ["1:11: streams[0]: must be a mapping of keys to values"]


def test_files_that_cannot_be_read_are_problems_too(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError) as raised:
        load_streams([tmp_path / "missing.yaml", tmp_path / "latin.yaml", tmp_path])
    assert str(raised.value) == "\n".join(
        [
            "3 problems in the stream file",
            f"  {tmp_path}/missing.yaml: cannot be read: No such file or directory; check the path",
            f"  {tmp_path}/latin.yaml: not UTF-8 text; save the file as UTF-8",
            f"  {tmp_path}: cannot be read: Is a directory; check the path",
        ]
    )


def test_a_stream_is_stored_as_plain_json(load: Load, tmp_path: Path) -> None:
    (stream,) = load(MINIMAL)
    stored = definition(stream)
    assert json.loads(json.dumps(stored)) == stored
    assert stored["source"]["tables"] == ["public.orders", "public.item_*"]
    assert stored["source"]["ack"] == "delivered"
    assert stored["targets"][0] == {
        "name": "log",
        "kind": "files",
        "limits": {"max_ms": 5000, "max_bytes": 16 << 20, "max_events": 500_000},
        "required": True,
        "options": {"path": f"{tmp_path}/log"},
        "dead_letters": {"on_reject": "letter", "max": 1000, "on_overflow": "halt"},
    }


def test_the_error_survives_pickling(load: Load) -> None:
    with pytest.raises(StreamFileError) as raised:
        load("name: X\n")
    again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301 - our own
    assert isinstance(again, StreamFileError)
    assert again.problems == raised.value.problems
    assert str(again) == str(raised.value)


def test_reading_a_file_does_not_import_spark(tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(MINIMAL)
    code = "import sys, millstream.config as c; c.load_streams(sys.argv[1:]); print('pyspark' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "shop.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout == "False\n"
