"""The page of a run: its numbers by brute force, damaged and hostile folders, the server, and a real browser."""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron.training.components import power
from megatron.training.components.power import powercap_counters
from megatron.training.incidents import Incident, record_incident
from tests.kit.browser import Browser, find_browser, open_browser
from tests.kit.runs import before_step, kill, records, start, tiny_run
from tools.lib.charts import FLAG_WIDTH, Chart, ChartBook, Curve, Mark, merge_marks, thin
from tools.lib.report_facts import happenings
from tools.lib.report_page import PageOptions, page_around, report_body, report_page
from tools.lib.report_server import LOOPBACK, LivePage, make_server
from tools.lib.run_hours import PARTS, run_hours
from tools.lib.run_record import read_record
from tools.report import main

HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"


class LogWriter:
    """Writes a log whose seconds are known: a ledger of where each one went."""

    def __init__(self, folder: Path) -> None:
        """Begin at some time."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.now, self.step, self.lines = 1e9, 0, list[str]()
        self.ledger: dict[str, float] = {}
        self.facts: dict[str, str] = {}
        self.since_line: list[tuple[int, float]] = []  # steps and their seconds since the last line
        self.logged: list[tuple[int, float]] = []  # all of the log, those taken again included

    def spend(self, part: str, seconds: float) -> float:
        """Let time pass."""
        self.ledger[part] = self.ledger.get(part, 0.0) + seconds
        self.now += seconds
        return seconds

    def write(self, **fields: Any) -> None:
        """Write a line."""
        counts = {"iteration": self.step, "consumed-tokens": self.step * 100, "consumed-samples": self.step * 10}
        self.lines.append(json.dumps({**counts, **fields, "time": self.now}))
        (self.folder / "metrics.jsonl").write_text("\n".join(self.lines) + "\n")

    def begin(self, step: int, phases: dict[str, float], first_step: float) -> None:
        """Start at a step, and take the first."""
        taken_again = [(s, seconds) for s, seconds in self.logged if s > step]
        self.ledger["training"] = self.ledger.get("training", 0.0) - sum(seconds for _, seconds in taken_again)
        self.ledger["lost"] = self.ledger.get("lost", 0.0) + sum(seconds for _, seconds in taken_again)
        self.logged = [pair for pair in self.logged if pair[0] <= step]
        self.step, self.since_line = step, []
        for seconds in phases.values():
            self.spend("start-up", seconds)
        self.write(event="start", **{"world-size": 4, **self.facts})
        self.take(first_step)
        self.write(event="start-up", seconds=0, phases={**phases, "first step": first_step}, slowest={})

    def take(self, *seconds: float) -> None:
        """Take steps."""
        for each in seconds:
            self.step += 1
            self.now += each
            self.since_line.append((self.step, each))

    def log(self, **fields: Any) -> None:
        """Write the line of the steps since the last one."""
        mean = sum(seconds for _, seconds in self.since_line) / len(self.since_line)
        self.ledger["training"] = self.ledger.get("training", 0.0) + sum(seconds for _, seconds in self.since_line)
        self.logged += [(step, mean) for step, _ in self.since_line]
        self.since_line = []
        loss = 2 + 3 / self.step
        line = {"lm loss": loss, "batch-size": 10, "iteration-time": mean, "grad-norm": 1.0, "learning-rate": 0.1}
        self.write(**line, **{"skipped-iterations": [], "tokens-per-second": 100 / mean}, **fields)

    def die(self) -> None:
        """Be killed: the steps since the last line are recorded nowhere."""
        self.spend("unrecorded", 0.0)
        self.ledger["unrecorded"] += sum(seconds for _, seconds in self.since_line)


def stormy(folder: Path, seed: int) -> LogWriter:
    """A run that is killed, stopped and started again at random."""
    chance, log = random.Random(seed), LogWriter(folder)
    saved = 0
    for start_number in range(5):
        log.begin(saved, {"python": chance.uniform(1, 9), "data": chance.uniform(0, 3)}, chance.uniform(1, 5))
        for _ in range(chance.randint(2, 6)):
            log.take(*(chance.uniform(0.5, 2) for _ in range(chance.randint(1, 5))))
            log.log()
            if chance.random() < 0.4:
                seconds = log.spend("evaluation", chance.uniform(1, 4))
                log.write(**{"lm loss validation": 2.0, "validation-time": seconds})
            if chance.random() < 0.5:
                blocked = log.spend("saving", chance.uniform(0.1, 2))
                saved = log.step
                values = {"path": "/nowhere", "bytes": 1, "seconds": 9.0, "blocking-seconds": blocked}
                log.write(event="checkpoint", **values)
            log.spend("other", chance.uniform(0, 1))
        if start_number == 4:
            break
        if chance.random() < 0.5:
            log.write(event="stop", text="stopped by signal 15")
            log.spend("waiting", chance.uniform(10, 99))
        else:
            log.write(event="note", text="the last record before it dies")
            log.take(*(chance.uniform(0.5, 2) for _ in range(chance.randint(0, 3))))
            log.die()
            log.spend("unrecorded", chance.uniform(10, 99))
    log.write(event="note", text="the end")
    return log


@pytest.mark.parametrize("seed", range(8))
def test_hours_are_those_of_the_ledger_and_sum_to_the_wall_clock(tmp_path: Path, seed: int) -> None:
    log = stormy(tmp_path, seed)
    hours = run_hours(read_record(tmp_path))
    assert hours.total == pytest.approx(log.now - 1e9, abs=1e-3)
    assert sum(hours.parts.values()) == pytest.approx(hours.total, abs=1e-3)
    expected = {part: log.ledger.get(part, 0.0) for part in hours.parts}
    assert hours.parts == pytest.approx(expected, abs=1e-3)
    assert hours.rank_seconds == pytest.approx(
        4 * (hours.total - hours.parts["unrecorded"] - hours.parts["waiting"]), abs=1e-2
    )


def test_building_the_next_phase_in_the_same_process_is_start_up(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.begin(0, {"python": 1.0, "data": 2.0}, 2.0)
    log.log()
    log.spend("start-up", 3.0)  # before it opens its log
    log.facts = {"phase": "anneal"}
    log.begin(1, {"python": 0.0, "data": 4.0}, 1.0)
    log.log(phase="anneal")
    parts = run_hours(read_record(tmp_path)).parts
    assert (parts["start-up"], parts["training"], parts["unrecorded"]) == pytest.approx((10.0, 3.0, 0.0))


def test_a_rewind_loses_steps_and_builds_again(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.begin(0, {"python": 1.0}, 2.0)
    log.take(1.0, 1.0, 1.0)
    log.log()
    log.write(event="warning", text="elastic replica 1 left after step 4", kind="replica-lost")
    log.write(event="rewind", text="goes back from step 4 to step 2")
    log.spend("start-up", 5.0)
    log.begin(2, {"python": 0.0, "checkpoint": 2.0}, 1.0)
    log.log()
    record = read_record(tmp_path)
    parts = run_hours(record).parts
    assert (parts["start-up"], parts["lost"], parts["unrecorded"]) == pytest.approx((8.0, 2.5, 0.0))
    assert [each.kind for each in happenings(record)] == ["replica", "rewind"]


def test_a_line_that_a_restart_takes_again_in_part_is_lost_in_part(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.begin(0, {"python": 1.0}, 2.0)
    log.take(*[2.0] * 9)
    log.log(**{"energy-joules": 50.0})
    log.begin(4, {"python": 1.0}, 2.0)
    log.log(**{"energy-joules": 7.0})
    hours = run_hours(read_record(tmp_path))
    assert (hours.parts["training"], hours.parts["lost"]) == pytest.approx((4 * 2.0 + 2.0, 6 * 2.0))
    assert (hours.joules, hours.tokens) == pytest.approx((57.0, 500.0))


# ---- A real run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed and went on, with experts, evaluations, an incident and hostile texts."""
    folder = tmp_path_factory.mktemp("runs") / "<b>run & 'all'"
    flags = "--train-iters 30 --num-experts 4 --eval-interval 10 --eval-iters 1 --save-interval 8 "
    flags += f"--save {folder.parent}/saved --split 90,10,0"
    start(tiny_run(folder, flags), before_step(15, kill))
    assert start(tiny_run(folder, flags)).status == 0
    with (folder / "metrics.jsonl").open("a") as file:
        counts = {"iteration": 30, "consumed-tokens": 30 * 32, "time": records(folder)[-1]["time"] + 1}
        for kind in ("warning", "incident", "samples"):
            file.write(json.dumps({"event": kind, "text": HOSTILE, "kind": "spike", **counts}) + "\n")
    record_incident(folder, Incident("spike", 12, HOSTILE, {"<script>": HOSTILE}))
    for kind, text, seconds in (
        ("lost-contact", f"stalled {HOSTILE}", 1796067104.3),
        ("other", "E825 the batch is not the checkpoint's", 1e9),
        ("other", "E983 a step differs from its replay", records(folder)[-1]["time"] - 0.1),
    ):
        line = {"time": seconds, "rank": 3, "host": "n7", "local_rank": 3, "kind": kind, "sentence": text}
        with (folder / "failures.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"]["tokenizer_model"] = HOSTILE
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


class Elements(HTMLParser):
    """The elements and the texts of a page."""

    def __init__(self, page: str) -> None:
        """Parse it."""
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        """Note the data of the script."""
        if '"charts"' in data and data.startswith("{"):
            self.data = data


def chart_data(page: str, name: str) -> list[dict[str, list[Any]]]:
    """The curves of a chart, as the script of the page reads them."""
    charts = json.loads(Elements(page).data)["charts"]
    curves: list[dict[str, list[Any]]] = next(chart for chart in charts if chart["id"] == name)["curves"]
    return curves


def test_numbers_are_those_of_the_log(run: Path) -> None:
    page = report_page(read_record(run), PageOptions())
    kept: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if line.get("event") == "start":  # what it takes again does not count
            kept = {step: old for step, old in kept.items() if step <= line["iteration"]}
        elif "lm loss" in line:
            kept[line["iteration"]] = line
    assert sorted(kept) == list(range(1, 31))
    for chart, curve, name in (("loss", 0, "lm loss"), ("norm", 0, "grad-norm"), ("step", 0, "iteration-time")):
        shown = chart_data(page, chart)[curve]
        assert shown["x"] == [line["consumed-tokens"] for line in kept.values()]
        assert shown["y"] == pytest.approx([line[name] for line in kept.values()], rel=1e-5)
    validation = chart_data(page, "loss")[2]
    by_step = {line["iteration"]: line["lm loss validation"] for line in records(run, "lm loss validation")}
    assert validation["y"] == pytest.approx([by_step[step] for step in sorted(by_step)], rel=1e-5)
    assert "1 start again" not in page
    assert "steps 9 to 14 are taken again" in page
    seconds = sum(line["iteration-time"] for line in kept.values())
    assert run_hours(read_record(run)).parts["training"] == pytest.approx(seconds, rel=1e-3)


def test_a_folder_cannot_put_elements_into_the_page(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main([str(run), "--out", str(out)]) == 0
    elements = Elements(out.read_text())
    assert elements.names.count("script") == 2
    assert not {"img", "b>run", "iframe", "link"} & {*elements.names}
    assert not [value for name, value in elements.attributes if name.startswith("on") or name == "src"]
    assert [value for name, value in elements.attributes if name == "href"] == [f"incidents/{spike(run)}/"]
    assert "&lt;/script&gt;" in out.read_text()


def test_failures_have_time_rank_and_machine_and_a_refused_start_is_none(run: Path) -> None:
    page = report_page(read_record(run), PageOptions())
    row = re.search(r"<td>([^<]*)</td><td>3</td><td>n7</td><td>lost-contact</td>", page)
    assert row is not None
    assert row[1] == "2026-11-30 19:31:44"
    assert "E825" not in page
    assert "E983 a step differs" in page


def test_the_time_of_a_stall_is_no_training(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.begin(0, {"python": 2.0}, 3.0)
    log.log()
    log.take(1.0, 1.5)
    log.spend("failed", 600.0)
    log.log()
    log.write(event="error", text="stalled")
    log.spend("waiting", 50.0)
    log.begin(3, {"python": 2.0}, 1.0)
    log.log()
    log.spend("failed", 7.0)  # of the first step after a line
    log.write(event="error", text="not finite")
    log.spend("waiting", 5.0)
    log.begin(3, {"python": 2.0}, 1.0)
    log.log()
    log.spend("other", 30.0)
    log.take(1.0)
    log.log()
    log.spend("failed", 7.0)
    log.write(event="error", text="not finite")
    expected = {part: log.ledger.get(part, 0.0) for part in PARTS}
    assert run_hours(read_record(tmp_path)).parts == pytest.approx(expected, abs=1e-3)


def test_what_was_undone_is_marked_where_it_happened(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.begin(0, {"python": 2.0}, 1.0)
    log.take(*[1.0] * 8)
    log.log()
    log.write(event="incident", text="a spike", kind="spike")
    log.write(event="rewind", text="went back to step 5")
    log.begin(5, {"data": 1.0}, 1.0)
    log.log()
    page = report_body(read_record(tmp_path), PageOptions())
    places = [float(x) for x in re.findall(r'<path class="mark (?:incident|rewind)" d="M([\d.]+) ', page)]
    assert {*places} == {1000.0}, "of step 9, with 6 kept"
    assert re.findall(r"--level:(\d)", page) == ["0", "1"], "none of two letters of one place hides the other"


def spike(run: Path) -> str:
    """The folder of the incident."""
    return next((run / "incidents").iterdir()).name


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b'{"iteration": 5, "lm loss": 2.0, "consumed-tok'),
        ("metrics.jsonl", b"\xff\xfe\x00[[[[\n{}\n[]\nnull\n" + b'{"a":' * 5000 + b"\n"),
        ("metrics.jsonl", b'{"iteration": 1e400, "time": NaN}\n{"iteration": "x", "time": 1}\n'),
        ("metrics.jsonl", b'{"event": "start-up", "phases": 3, "iteration": 1, "time": 1}\n'),
        (
            "metrics.jsonl",
            b'{"iteration": 1, "time": 5, "lm loss": NaN, "grad-norm": Infinity, "consumed-tokens": 8, '
            b'"consumed-samples": 1, "batch-size": true, "expert-loads": [[1, 2], null], "iteration-time": -1e308}\n',
        ),
        ("config.yaml", b"a: [1, {"),
        ("config.yaml", b"model: 3\nlist: [1]\n"),
        ("data.json", b'{"train": {"sources": [3, {"tokens": "x"}], "tokens": "many"}}'),
        ("data.json", b"[]"),
        ("environment.json", b'{"packages": 3, "device": ["a"]}'),
        ("failures.jsonl", b'{"rank": 3, "error": "x"}\nhalf a li'),
        ("incidents.md", b"\xff\xff"),
    ],
)
def test_damaged_files_cost_only_themselves(run: Path, tmp_path: Path, name: str, content: bytes) -> None:
    for file in ("metrics.jsonl", "config.yaml", "data.json", "environment.json"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    old = (tmp_path / name).read_bytes() if name == "metrics.jsonl" else b""
    (tmp_path / name).write_bytes(old + content)
    page = report_page(read_record(tmp_path), PageOptions(price=1.0))
    data = json.loads(Elements(page).data)
    assert len(data["charts"]) > 5
    (tmp_path / name).unlink()
    report_page(read_record(tmp_path), PageOptions())


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        assert main([str(folder)]) == 2
        assert capsys.readouterr().err.startswith(f"report: {folder} is not a")


def test_another_run_is_compared(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    start(tiny_run(other, "--train-iters 3 --lr 0.5"))
    assert main([str(other), "--against", str(run), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "--lr: 0.5 | 0.01" in page
    assert len(chart_data(page, "loss")) == 3
    assert main([str(other), "--against", str(tmp_path / "none")]) == 2


# ---- Parts


def test_thinning_keeps_what_stands_out() -> None:
    generator = np.random.default_rng(0)
    y = generator.normal(size=300_000)
    y[[7, 123_456]], y[222_222] = (-50.0, 60.0), np.nan
    x, thinned = thin(np.arange(300_000.0), y)
    assert len(x) < 3000
    assert (np.nanmin(thinned), np.nanmax(thinned)) == (-50.0, 60.0)
    assert np.isnan(thinned).sum() == 1
    assert (x[0], x[-1]) == (0, 299_999)
    assert (np.diff(x) > 0).all()


def test_many_marks_become_few() -> None:
    marks = [Mark("skipped", float(n), f"{n}") for n in range(1000)]
    merged = merge_marks(marks, 0.0, 1000.0)
    assert len(merged) <= 41
    assert sum(count for _, count in merged) == 1000


def test_letters_stay_above_their_marks_and_hide_no_other() -> None:
    kinds = ("error", "restart")
    marks = [Mark(kinds[n % 2], 9.0 * n, "") for n in range(30)]
    chart = Chart("loss", "Loss", [Curve("loss", np.array([0.0, 1000.0]), np.ones(2))], labels=True)
    page = "".join(ChartBook(0.0, 1000.0, marks).draw(chart))
    letters = re.findall(r'class="flag.*?left:([\d.]+)%;--level:(\d+)', page)
    rows = {level: [float(left) for left, each in letters if each == level] for _, level in letters}
    assert len(letters) == 30
    assert len(rows) == 2
    assert all(np.diff(row).min() >= FLAG_WIDTH / 10 for row in rows.values())


# ---- Energy


def test_energy_is_in_log_lines_where_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "1000000"), ("max_energy_range_uj", "5000000")):
        (zone / name).write_text(text)
    (counter,) = powercap_counters(tmp_path)
    readings = []
    for microjoules in (2_000_000, 4_500_000, 500_000, 1_500_000, 100_000):  # it begins anew twice
        (zone / "energy_uj").write_text(str(microjoules))
        readings.append(counter())
    assert np.diff(readings) == pytest.approx([2.5, 1.0, 1.0, 3.6])
    monkeypatch.setattr(power, "POWERCAP", tmp_path)

    def use(trainer: object) -> None:
        (zone / "energy_uj").write_text("2600000")

    start(tiny_run(tmp_path / "run", "--train-iters 2 --log-interval 2"), before_step(2, use))
    (line,) = records(tmp_path / "run")
    assert line["energy-joules"] == pytest.approx(2.5)
    assert 0 < line["power-watts"] < math.inf
    assert "J per token" in report_page(read_record(tmp_path / "run"), PageOptions())


def test_energy_that_cannot_be_read_is_not_invented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "POWERCAP", tmp_path / "nothing")
    start(tiny_run(tmp_path / "run", "--train-iters 2"))
    assert not [name for line in records(tmp_path / "run") for name in line if "joules" in name or "watts" in name]
    assert "not measured" in report_page(read_record(tmp_path / "run"), PageOptions())


# ---- Served


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """The page at a free port: its path, and the port."""
    live = LivePage(
        folder, lambda: report_body(read_record(folder), PageOptions()), lambda body: page_around(body, "live")
    )
    server, address = make_server(live, LOOPBACK, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield address.partition(f":{server.server_port}")[2], server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and content of an answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_nothing_but_the_page_is_served(tmp_path: Path) -> None:
    stormy(tmp_path, 1)
    (tmp_path / "secret").write_text("secret")
    with served(tmp_path) as (path, port):
        assert get(port, path)[0] == 200
        assert get(port, f"{path}state.json")[0] == 200
        inside = (f"{path}{name}" for name in ("secret", "../secret", "%2e%2e/", "metrics.jsonl"))
        for wrong in ("/", "/state.json", "/x/", f"{path[:-2]}/", *inside):
            status, content = get(port, wrong)
            assert (status, "secret" in content) == (404, False), wrong
        assert get(port, path, "POST")[0] == 501


def test_a_log_that_grows_shrinks_and_is_replaced_is_followed(tmp_path: Path) -> None:
    log = stormy(tmp_path, 2)
    with served(tmp_path) as (path, port):

        def news(after: str = "") -> dict[str, Any]:
            found: dict[str, Any] = json.loads(get(port, f"{path}state.json?after={after}")[1])
            return found

        first = news()
        assert "body" not in news(first["state"])

        def changed(content: bytes | None) -> str:
            file = tmp_path / "metrics.jsonl"
            if content is None:
                file.unlink()
            else:
                file.with_suffix(".new").write_bytes(content)
                file.with_suffix(".new").replace(file)
            for _ in range(400):
                if (found := news(changed.state))["state"] != changed.state:  # type: ignore[attr-defined]
                    changed.state = found["state"]  # type: ignore[attr-defined]
                    return str(found["body"])
                threading.Event().wait(0.02)
            return ""

        changed.state = first["state"]  # type: ignore[attr-defined]
        log.take(1.0)
        whole = "\n".join(log.lines).encode() + b"\n"
        half = whole + b'{"iteration": 999, "lm lo'
        assert f"<dd>{log.step - 1:,}</dd>" in changed(half)
        assert f"<dd>{log.step:,}</dd>" in changed(whole + line_of(log))
        assert "<h1>" in changed(b"\n".join(whole.splitlines()[:3]) + b"\n")
        assert f"<dd>{log.step - 1:,}</dd>" in changed(whole)


def line_of(log: LogWriter) -> bytes:
    """The next line of a log."""
    log.log()
    return log.lines[-1].encode() + b"\n"


# ---- In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser."""
    if find_browser() is None:
        pytest.skip("no browser: bash tests/install.sh")
    with open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def page_of(run: Path, folder: Path) -> str:
    """The address of the page of a run."""
    out = folder / "report.html"
    main([str(run), "--out", str(out), "--price", "2"])
    return out.as_uri()


def test_the_page_is_whole_without_scripts_and_network(browser: Browser, run: Path, tmp_path: Path) -> None:
    address = page_of(run, tmp_path)
    browser.open(address, script=False)
    curves = browser.evaluate("[...document.querySelectorAll('.curve')].map(c => c.getBoundingClientRect().width)")
    assert len(curves) > 10
    assert max(curves) > 900
    labels = browser.evaluate("[...document.querySelectorAll('#chart-loss .y span')].map(s => s.textContent)")
    assert len(labels) >= 3
    assert browser.evaluate("getComputedStyle(document.querySelector('.js')).display") == "none"
    assert browser.requests == [address]


def test_nothing_hostile_runs_and_no_script_fails(browser: Browser, run: Path, tmp_path: Path) -> None:
    address = page_of(run, tmp_path)
    browser.open(address)
    assert browser.evaluate("typeof window.owned") == "undefined"
    assert browser.errors == []
    assert browser.requests == [address]
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned = 1\">')")
    browser.until("document.querySelector('img').complete")
    assert browser.evaluate("typeof window.owned") == "undefined"  # the policy of the page refuses it


def place_of(browser: Browser, chart: str) -> list[float]:
    """Left, top and width of a chart in the window."""
    plot = f"document.querySelector('#chart-{chart} .plot')"
    browser.evaluate(f"{plot}.scrollIntoView({{block: 'center'}})")
    found: list[float] = browser.evaluate(f"(r => [r.x, r.y, r.width])({plot}.getBoundingClientRect())")
    return found


def test_the_cursor_shows_the_values_of_the_log(browser: Browser, run: Path, tmp_path: Path) -> None:
    browser.open(page_of(run, tmp_path))
    box = place_of(browser, "norm")
    line = next(line for line in records(run)[::-1] if line["iteration"] == 20)
    top = max(each["consumed-tokens"] for each in records(run))
    browser.mouse("mouseMoved", box[0] + box[2] * line["consumed-tokens"] / top, box[1] + 20)
    browser.until("document.querySelectorAll('.cursor').length > 5")
    shown = browser.evaluate("document.querySelector('#chart-norm output').textContent")
    assert float(shown) == pytest.approx(line["grad-norm"], rel=1e-3)
    rate = browser.evaluate("document.querySelector('#chart-rate output').textContent")  # in every chart
    assert float(rate) == pytest.approx(line["learning-rate"], rel=1e-3)


def test_keys_and_the_mouse_zoom_all_charts(browser: Browser, run: Path, tmp_path: Path) -> None:
    browser.open(page_of(run, tmp_path))
    view = "document.querySelector('#chart-norm .plot > svg').getAttribute('viewBox').split(' ').map(Number)"
    whole = browser.evaluate(view)
    browser.evaluate("document.querySelector('#chart-loss').focus()")
    browser.key("+", "+")
    left, _, width, _ = browser.evaluate(view)
    assert (left, width) == pytest.approx((250, 500), abs=1)
    browser.key("0", "0")
    assert browser.evaluate(view)[2] == whole[2]
    box = place_of(browser, "loss")
    for kind, share in (("mousePressed", 0.2), ("mouseMoved", 0.3), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
        browser.mouse(kind, box[0] + box[2] * share, box[1] + 30)
    left, _, width, _ = browser.evaluate(view)
    assert (left, width) == pytest.approx((200, 400), abs=2)
    browser.evaluate("document.querySelector('#chart-load input').click()")
    hidden = "getComputedStyle(document.querySelector('#chart-load .curve')).display"
    assert browser.evaluate(hidden) == "none"


@pytest.mark.parametrize(("width", "dark"), [(380, False), (1280, True), (2200, False)])
def test_it_fits_the_screen_in_light_and_dark(
    browser: Browser, run: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.open(page_of(run, tmp_path), width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.errors == []
    back = re.findall(r"\d+", browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (int(back[0]) < 60) == dark
    assert len(browser.screenshot(tmp_path / "page.png")) > 20_000


def test_a_served_page_shows_what_is_new(browser: Browser, tmp_path: Path) -> None:
    log = stormy(tmp_path, 3)
    with served(tmp_path) as (path, port):
        browser.open(f"http://{LOOPBACK}:{port}{path}")
        browser.until("/read at/.test(document.querySelector('.live').textContent)")
        log.take(1.0)
        log.log()
        browser.until(f"document.querySelector('.cards').textContent.includes('{log.step:,}')")
        assert browser.errors == []
        assert browser.evaluate("document.querySelectorAll('script').length") == 2
